//! Aligned columns without borders, no wider than a terminal. Cells must already be
//! [`printable`](super::text::printable).

use comfy_table::{CellAlignment, ContentArrangement, Row, Table, presets};

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

/// Formats a table of text with a header, of as many columns as there are titles, and as wide as they need.
pub fn of_any_width(titles: Vec<String>, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = bare(rows);
    table.set_content_arrangement(ContentArrangement::Disabled).set_header(titles);
    table.trim_fmt()
}

/// Formats rows without a header: names and descriptions.
pub fn list<const N: usize>(rows: impl IntoIterator<Item = [String; N]>) -> String {
    bare(rows).trim_fmt()
}

fn bare(rows: impl IntoIterator<Item: Into<Row>>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH_MAX);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}
