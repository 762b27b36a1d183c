//! Text set in columns, without lines, no wider than a terminal. Cells must be
//! [`printable`](super::text::printable) already.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// Columns of characters at most; longer cells are wrapped.
pub const WIDTH_MAX: u16 = 100;

/// How a column is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A table under a header.
pub fn table<const N: usize>(
    columns: [(&str, Align); N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = bare();
    table.set_header(columns.map(|(title, _)| title));
    table.add_rows(rows);
    set(table, columns.map(|(_, align)| align))
}

/// Rows without a header: names, and what is to be said of each.
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
