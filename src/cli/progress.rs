//! Runs work with a progress bar on stderr, if that is a terminal, and cancels it on Ctrl-C.

use super::text::short;
use crate::config::{Config, shows_progress};
use crate::pipeline::job::Job;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// How often the bar moves, and how long Ctrl-C takes at most.
const TICK: Duration = Duration::from_millis(100);

/// Runs a job and shows its progress. Ctrl-C and SIGTERM cancel it, so that it can clean up; a second one
/// ends the program immediately.
pub fn watch<T: Send>(
    label: &str,
    quiet: bool,
    config: &Config,
    work: impl FnOnce(&Arc<Job>) -> T + Send,
) -> T {
    let job = &Job::of(config);
    let bar = bar(label, quiet);
    let interrupted = interrupted();
    // Carries no message: the worker drops its end when the work is done.
    let (working, done) = mpsc::channel::<()>();
    // The worker takes it, or this thread if the system starts no more threads.
    let work = Mutex::new(Some(work));
    let work = || work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let result = std::thread::scope(|scope| {
        let worker = move || {
            let _working = working;
            job.lower_thread();
            work().map(|work| work(job))
        };
        let worker = match std::thread::Builder::new().spawn_scoped(scope, worker) {
            Ok(worker) => worker,
            Err(error) => {
                tracing::warn!(%error, "no thread to show progress with: only a second Ctrl-C ends the program");
                return Ok(work().map(|work| work(job)));
            }
        };
        while done.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            let progress = job.progress();
            bar.set_length(progress.total);
            bar.set_position(progress.written);
            if interrupted.load(Relaxed) {
                job.cancel();
            }
        }
        worker.join()
    });
    bar.finish_and_clear();
    let done = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    done.expect("one thread has taken the work")
}

fn bar(label: &str, quiet: bool) -> ProgressBar {
    if quiet || !std::io::stderr().is_terminal() || !shows_progress() {
        return ProgressBar::hidden();
    }
    let style =
        "{msg}  {bar:24}  {decimal_bytes} of {decimal_total_bytes}  {decimal_bytes_per_sec}";
    let style = ProgressStyle::with_template(style).unwrap_or(ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
        .with_style(style.progress_chars("=> "))
        .with_message(short(label, 40))
}

/// Whether Ctrl-C or SIGTERM came during a job.
pub fn is_interrupted() -> bool {
    interrupted().load(Relaxed)
}

/// Ctrl-C and SIGTERM set this flag, from the first call on.
fn interrupted() -> &'static Arc<AtomicBool> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    FLAG.get_or_init(|| {
        let set = Arc::<AtomicBool>::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order, so that the first signal sets the flag and only the second ends the program.
            let _ = flag::register_conditional_shutdown(signal, 130, set.clone());
            let _ = flag::register(signal, set.clone());
        }
        set
    })
}
