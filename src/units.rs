//! Sizes and times in words, with three digits. Imports nothing of ringstow's, so that every layer may use it.

use bytesize::ByteSize;
use std::time::Duration;

/// A size in powers of ten, as disks are sold: `4.19 MB`.
pub fn size(bytes: u64) -> String {
    let last = 10u64.pow(bytes.max(1).ilog10().saturating_sub(2));
    let rounded = (bytes.saturating_add(last / 2) / last).saturating_mul(last);
    let decimals = 2 - rounded.max(1).ilog10() as usize % 3;
    format!("{:.decimals$}", ByteSize(rounded).display().si())
}

/// `12 ms`, `1.52 s`, `185 s`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        ..0.00995 => format!("{:.1} ms", seconds * 1e3),
        ..0.9995 => format!("{:.0} ms", seconds * 1e3),
        ..9.995 => format!("{seconds:.2} s"),
        ..99.95 => format!("{seconds:.1} s"),
        _ => format!("{seconds:.0} s"),
    }
}

/// The time that a text such as `30s`, `1h30min` or `2d` names.
///
/// # Errors
/// What is wrong with it.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("it must be more than zero".into()),
        parsed => parsed.map_err(|why| why.to_string()),
    }
}

/// `1h 30m`: a time as [`parse_span`] reads it.
pub fn span(of: Duration) -> String {
    humantime::format_duration(of).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        let said = [0, 999, 1000, 4_194_304, 99_960_000, 999_600_000, 1_073_741_824, u64::MAX];
        assert_eq!(
            said.map(size),
            ["0 B", "999 B", "1.00 kB", "4.19 MB", "100 MB", "1.00 GB", "1.07 GB", "18.4 EB"]
        );
    }

    #[test]
    fn durations_have_three_digits_at_most() {
        let said = [0.0004, 0.00996, 0.9994, 0.9996, 9.996, 99.96].map(duration);
        assert_eq!(said, ["0.4 ms", "10 ms", "999 ms", "1.00 s", "10.0 s", "100 s"]);
    }

    #[test]
    fn spans_are_read_with_their_units_and_written_so() {
        for (text, seconds, said) in
            [("30s", 30.0, "30s"), ("1h 30min", 5400.0, "1h 30m"), ("1.5d", 129_600.0, "1day 12h")]
        {
            let read = parse_span(text).unwrap();
            assert_eq!((read.as_secs_f64(), &*span(read)), (seconds, said));
            assert_eq!(parse_span(&span(read)), Ok(read));
        }
        for text in ["", "0s", "10", "2 fortnights", "-1s"] {
            parse_span(text).unwrap_err();
        }
    }
}
