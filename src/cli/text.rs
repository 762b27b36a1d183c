//! Formats sizes, times and names for people.

pub(super) use crate::units::size;

use crate::format::Metrics;
use bytesize::ByteSize;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// Makes text from a checkpoint or a path safe to show on a terminal: escapes control characters, escape
/// sequences and characters that reorder text.
pub fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\'' | '"' | '\\' => safe.push(c),
            // `escape_debug` knows what is printable; a combining mark is only printable after a letter.
            _ => safe.extend(String::from_iter(['a', c]).escape_debug().skip(1)),
        }
    }
    safe
}

/// [`printable`], line by line. Indents every line after the first, so that a line break in a file's text
/// cannot fake a line of the program.
pub fn lines(text: &str) -> String {
    let lines: Vec<String> = text.trim_end().lines().map(printable).collect();
    lines.join("\n  ")
}

/// [`printable`], for a path.
pub fn path(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

/// [`printable`], shortened to `max` characters in the middle, since beginnings and ends distinguish names.
pub fn short(text: &str, max: usize) -> String {
    let count = text.chars().count();
    if count <= max {
        return printable(text);
    }
    let (head, tail) = (max / 2, max - max / 2 - 1);
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(count - tail).collect();
    format!("{}…{}", printable(&begin), printable(&end))
}

/// Formats a size in powers of two, as buffers have and settings are written: `4 MiB`, `1.5 GiB`.
pub fn binary_size(bytes: u64) -> String {
    let unit = 1u64 << (bytes.max(1).ilog2() / 10 * 10);
    let digits = usize::from(!bytes.is_multiple_of(unit));
    format!("{:.digits$}", ByteSize(bytes).display().iec())
}

/// `1 file`, `2 files`.
pub fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Maximum rows of a section without `--all`.
pub const ROWS_MAX: usize = 24;

/// Says how many of `count` rows are left out if `max` are shown, and how to see them. `None` if all are shown.
pub fn more(count: usize, max: usize, how: &str) -> Option<String> {
    let hidden = count.saturating_sub(max);
    (hidden > 0).then(|| format!("… {hidden} more{how}"))
}

/// How to see all rows of a section.
pub const ALL_SHOWS: &str = "; --all shows them";

/// A time in UTC: `2026-05-01T12:00:00Z`. `None` after the year 9999.
pub fn utc(unix_ms: u64) -> Option<String> {
    const YEAR_10000_MS: u64 = 253_402_300_800_000;
    (unix_ms < YEAR_10000_MS).then(|| {
        let moment = UNIX_EPOCH + Duration::from_millis(unix_ms);
        humantime::format_rfc3339_seconds(moment).to_string()
    })
}

/// Metrics by name: `accuracy 0.5, loss 0.25`.
pub fn metrics(metrics: &Metrics) -> String {
    let each = metrics.iter().map(|(name, number)| format!("{} {number}", printable(name)));
    each.collect::<Vec<_>>().join(", ")
}

/// The first metrics by name, and how many there are besides: `accuracy 0.5, loss 0.25, … 3 more`.
pub fn few_metrics(metrics: &Metrics, most: usize) -> String {
    const NAME_MAX: usize = 24;
    let shown = metrics.iter().take(most);
    let shown = shown.map(|(name, value)| format!("{} {}", short(name, NAME_MAX), number(*value)));
    shown.chain(more(metrics.len(), most, "")).collect::<Vec<_>>().join(", ")
}

/// A number with four significant digits.
fn number(value: f64) -> String {
    let rounded: f64 = format!("{value:.3e}").parse().unwrap_or(value);
    match rounded.abs() {
        0.0 | 1e-4..1e7 => format!("{rounded}"),
        _ if rounded.is_finite() => format!("{rounded:e}"),
        _ => format!("{value:.3e}"), // the largest numbers would round to infinity
    }
}

/// The text, or a dash where there is none.
pub fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}

/// Elements per dimension: `[32, 32]`.
pub fn shape(dims: &[u64]) -> String {
    const SHOWN_MAX: usize = 8;
    let mut shown: Vec<String> = dims.iter().take(SHOWN_MAX).map(u64::to_string).collect();
    if dims.len() > SHOWN_MAX {
        shown.push("…".into());
    }
    format!("[{}]", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sequences_are_escaped() {
        assert_eq!(printable("a\x1b[2Jb\r\n\u{9b}31m"), r"a\u{1b}[2Jb\r\n\u{9b}31m");
        assert_eq!(printable("\u{202e}cod"), r"\u{202e}cod");
        assert_eq!(
            printable("größe \"x\" 'y' \\ 层.0 e\u{301}"),
            "größe \"x\" 'y' \\ 层.0 e\u{301}"
        );
    }

    #[test]
    fn only_line_breaks_stay_unescaped_and_are_indented() {
        assert_eq!(lines("at line 2\n  |\n2 | a\x1b\n"), "at line 2\n    |\n  2 | a\\u{1b}");
        assert_eq!(lines("one"), "one");
        assert_eq!(lines("a\r\nringstow: all is well\rb"), "a\n  ringstow: all is well\\rb");
    }

    #[test]
    fn rows_that_are_left_out_are_counted_with_how_to_see_them() {
        assert_eq!(more(24, 24, ALL_SHOWS), None);
        assert_eq!(more(25, 24, ALL_SHOWS).as_deref(), Some("… 1 more; --all shows them"));
    }

    #[test]
    fn long_names_are_cut_in_the_middle() {
        assert_eq!(short("model.layers.0.weight", 9), "mode…ight");
        assert_eq!(short("ab", 2), "ab");
    }

    #[test]
    fn few_metrics_have_four_digits_and_the_rest_is_counted() {
        let metrics = [("a", 0.123456), ("b", 1e-9), ("c", f64::NAN), ("d", 1234567.8)];
        let metrics: Metrics = metrics.map(|(name, number)| (name.to_owned(), number)).into();
        assert_eq!(few_metrics(&metrics, 2), "a 0.1235, b 1e-9, … 2 more");
        assert_eq!(few_metrics(&metrics, 4), "a 0.1235, b 1e-9, c NaN, d 1235000");
        let odd = [0.0, -0.5, f64::MAX, f64::NEG_INFINITY, 12345678.0].map(number);
        assert_eq!(odd, ["0", "-0.5", "1.798e308", "-inf", "1.235e7"]);
    }

    #[test]
    fn bytes_are_said_in_the_largest_unit() {
        assert_eq!(binary_size(512), "512 B");
        assert_eq!(binary_size(8 << 20), "8 MiB");
        assert_eq!(binary_size(6144), "6 KiB");
        assert_eq!(binary_size(3 << 29), "1.5 GiB");
    }

    #[test]
    fn times_are_iso_and_never_panic() {
        assert_eq!(utc(0).as_deref(), Some("1970-01-01T00:00:00Z"));
        assert_eq!(utc(u64::MAX), None);
    }
}
