//! Measures what a save costs a training loop in several ways, each in turn. Included by path, since the examples are crates of
//! their own.

use std::error::Error;
use std::process::Command;
use std::time::Instant;

const ROUNDS: usize = 7;

/// How to save, and its name. A save in the background returns its handle, which is not timed.
pub type Way<'a> =
    (&'static str, Box<dyn FnMut() -> Result<Option<ringstow::SaveHandle>, Box<dyn Error>> + 'a>);

/// Lowest, median and highest.
fn spread(mut seconds: Vec<f64>) -> String {
    seconds.sort_by(f64::total_cmp);
    let (low, median, high) = (seconds[0], seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
    format!("{median:.3} s ({low:.3} to {high:.3})")
}

/// Prints the seconds of each way.
pub fn compare(mut ways: Vec<Way<'_>>) -> Result<(), Box<dyn Error>> {
    let mut seconds = vec![Vec::new(); ways.len()];
    for _ in 0..ROUNDS {
        for ((_, save), seconds) in ways.iter_mut().zip(&mut seconds) {
            let begun = Instant::now();
            let saving = save()?;
            seconds.push(begun.elapsed().as_secs_f64());
            saving.map(|saving| saving.result()).transpose()?;
            Command::new("sync").status()?; // what was not synced must not slow the next one down
        }
    }
    for ((name, _), seconds) in ways.iter().zip(seconds) {
        println!("{name}: {}", spread(seconds));
    }
    Ok(())
}
