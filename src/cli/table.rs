//! Aligned columns without borders, no wider than a terminal. Cells must already be
//! [`printable`](super::text::printable).

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// Maximum width in characters; longer cells wrap.
pub const WIDTH_MAX: u16 = 100;

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Formats a table with a header.
pub fn table<const N: usize>(
    columns: [(&str, Align); N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = bare();
    table.set_header(columns.map(|(title, _)| title));
    table.add_rows(rows);
    set(table, columns.map(|(_, align)| align))
}

/// Formats rows without a header: names and descriptions.
pub fn list<const N: usize>(rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = bare();
    table.add_rows(rows);
    set(table, [Align::Left; N])
}

fn bare() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH_MAX);
    table
}

fn set<const N: usize>(mut table: Table, aligns: [Align; N]) -> String {
    for (column, align) in table.column_iter_mut().zip(aligns) {
        column.set_padding((0, 2));
        if align == Align::Right {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}
