//! Aligned columns without borders, no wider than a terminal. Cells must already be
//! [`printable`](super::text::printable).

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// Maximum width in characters; longer cells wrap.
pub const WIDTH_MAX: u16 = 100;

/// Formats a table with a header. A title begins with its column's alignment, as in `format!`: `<` for text, `>` for
/// numbers.
pub fn table<const N: usize>(
    titles: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = bare(rows);
    table.set_header(titles.map(|title| &title[1..]));
    for (column, title) in table.column_iter_mut().zip(titles) {
        if title.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Formats rows without a header: names and descriptions.
pub fn list<const N: usize>(rows: impl IntoIterator<Item = [String; N]>) -> String {
    bare(rows).trim_fmt()
}

fn bare<const N: usize>(rows: impl IntoIterator<Item = [String; N]>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH_MAX);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}
