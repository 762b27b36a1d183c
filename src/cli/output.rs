//! Standard output and standard error, for people and for programs. A reader that has seen enough
//! (`| head`) ends the output, not the program.

use super::text::printable;
use crate::error::{Error, Result};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, BufWriter, Stdout, Write};

/// Standard output.
pub struct Output {
    to: BufWriter<Stdout>,
    /// The reader is gone: whatever else is said goes nowhere.
    closed: bool,
}

impl Output {
    /// That of this process.
    pub fn stdout() -> Self {
        Self { to: BufWriter::new(io::stdout()), closed: false }
    }

    /// Prints a line, or several.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what the system says, unless it is that the reader is gone.
    pub fn line(&mut self, text: impl AsRef<str>) -> Result<()> {
        let text = text.as_ref();
        self.attempt(|to| writeln!(to, "{text}"))
    }

    /// Prints a value as JSON. In paths, a byte that is no UTF-8 stands as U+0000 and two hex digits.
    ///
    /// # Errors
    /// As [`Output::line`]; also for what JSON has no word for.
    pub fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|e| Error::invalid(format!("this cannot be said in JSON: {e}")))?;
        self.line(escape_controls(&text))
    }

    /// Prints a value as JSON where that was asked for, and in words elsewhere.
    ///
    /// # Errors
    /// As [`Output::json`].
    pub fn print(
        &mut self,
        as_json: bool,
        value: &impl Serialize,
        in_words: impl FnOnce() -> String,
    ) -> Result<()> {
        if as_json { self.json(value) } else { self.line(in_words()) }
    }

    /// Hands what was printed so far to the reader.
    ///
    /// # Errors
    /// As [`Output::line`].
    pub fn finish(&mut self) -> Result<()> {
        self.attempt(Write::flush)
    }

    fn attempt(
        &mut self,
        act: impl FnOnce(&mut BufWriter<Stdout>) -> io::Result<()>,
    ) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        match act(&mut self.to) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            // No [`Error::Io`]: its remedies are those for a checkpoint's disk.
            result => {
                result.map_err(|e| Error::invalid(format!("writing to the standard output: {e}")))
            }
        }
    }
}

/// Says something on stderr, in one line.
pub fn note(text: &str) {
    say(&printable(text));
}

/// Says on stderr what is safe to show on a terminal already, in a line or several.
pub fn say(safe: &str) {
    let _ = writeln!(io::stderr(), "ringstow: {safe}");
}

/// JSON lets DEL and the C1 controls stand in a string as they are, and terminals act on them.
fn escape_controls(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' => {
                let _ = write!(safe, "\\u{:04x}", c as u32);
            }
            _ => safe.push(c),
        }
    }
    safe
}
