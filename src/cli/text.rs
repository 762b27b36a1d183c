//! Numbers, times and names as people read them.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// Text from a checkpoint or a path, safe to show on a terminal: control characters, escape
/// sequences and what reorders text stand as escapes.
pub fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\'' | '"' | '\\' => safe.push(c),
            // Debug formatting knows what is printable. A combining mark is, behind a letter.
            _ => safe.extend(String::from_iter(['a', c]).escape_debug().skip(1)),
        }
    }
    safe
}

/// [`printable`], a line at a time. Those behind the first are indented: text of a file's that has
/// line breaks of its own passes for no line that the program says.
pub fn lines(text: &str) -> String {
    let lines: Vec<String> = text.trim_end().lines().map(printable).collect();
    lines.join("\n  ")
}

/// [`printable`], for a path.
pub fn path(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

/// [`printable`], with no more than `max` characters: the middle goes, beginnings and ends tell
/// names apart.
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

/// A size in powers of ten, as disks are sold: `4.19 MB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$} {}", UNITS[unit])
}

/// A size that is a power of two, as buffers are: `4 MiB`.
pub fn binary_size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let mut value = bytes;
    let mut unit = 0;
    while value >= 1024 && value.is_multiple_of(1024) && unit + 1 < UNITS.len() {
        value /= 1024;
        unit += 1;
    }
    format!("{value} {}", UNITS[unit])
}

/// `1 file`, `2 files`.
pub fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A moment in UTC: `2026-05-01T12:00:00Z`. `None` beyond the year 9999.
pub fn utc(unix_ms: u64) -> Option<String> {
    const YEAR_10000_MS: u64 = 253_402_300_800_000;
    (unix_ms < YEAR_10000_MS).then(|| {
        let moment = UNIX_EPOCH + Duration::from_millis(unix_ms);
        humantime::format_rfc3339_seconds(moment).to_string()
    })
}

/// Elements a dimension: `[32, 32]`.
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
    fn what_a_terminal_would_act_on_is_escaped() {
        assert_eq!(printable("a\x1b[2Jb\r\n\u{9b}31m"), r"a\u{1b}[2Jb\r\n\u{9b}31m");
        assert_eq!(printable("\u{202e}cod"), r"\u{202e}cod");
        assert_eq!(
            printable("größe \"x\" 'y' \\ 层.0 e\u{301}"),
            "größe \"x\" 'y' \\ 层.0 e\u{301}"
        );
    }

    #[test]
    fn lines_stay_lines_and_nothing_else_does() {
        assert_eq!(lines("at line 2\n  |\n2 | a\x1b\n"), "at line 2\n    |\n  2 | a\\u{1b}");
        assert_eq!(lines("one"), "one");
        assert_eq!(lines("a\r\nringstow: all is well\rb"), "a\n  ringstow: all is well\\rb");
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(short("model.layers.0.weight", 9), "mode…ight");
        assert_eq!(short("ab", 2), "ab");
    }

    #[test]
    fn sizes_have_three_digits() {
        let said = [0, 999, 1000, 4_194_304, 99_960_000, 999_600_000, 1_073_741_824, u64::MAX];
        assert_eq!(
            said.map(size),
            ["0 B", "999 B", "1.00 kB", "4.19 MB", "100 MB", "1.00 GB", "1.07 GB", "18447 PB"]
        );
        assert_eq!(binary_size(4 << 20), "4 MiB");
        assert_eq!(binary_size(6144), "6 KiB");
    }

    #[test]
    fn times_are_iso_and_no_time_panics() {
        assert_eq!(utc(0).as_deref(), Some("1970-01-01T00:00:00Z"));
        assert_eq!(utc(u64::MAX), None);
    }
}
