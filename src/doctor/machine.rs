//! Checks the machine: kernel, io_uring.

use crate::config::Config;
use crate::doctor::{Check, gpu, memory};
use crate::engine::io_mode::{self, EngineKind};
use crate::error::Error;

pub(crate) fn checks(config: &Config) -> Vec<Check> {
    let mut checks = vec![kernel(), engines(config)];
    checks.extend(ring(config));
    checks.extend(memory::checks(config));
    checks.extend(gpu::checks());
    checks
}

fn kernel() -> Check {
    let name = rustix::system::uname();
    let found =
        format!("{} {}", name.sysname().to_string_lossy(), name.release().to_string_lossy());
    if cfg!(target_os = "linux") {
        Check::ok("kernel", found)
    } else {
        Check::warn(
            "kernel",
            found,
            "io_uring and O_DIRECT need Linux; the portable engine is used",
        )
    }
}

/// The engines of this build, in the order in which they are tried.
fn engines(config: &Config) -> Check {
    let built: Vec<&str> =
        EngineKind::ALL.into_iter().filter(|kind| kind.is_built()).map(EngineKind::name).collect();
    let found = built.join(", ");
    match io_mode::modes(config) {
        Err(Error::Unsupported { what, remedy }) => {
            Check::fail("engines", format!("{found}; {what}"), remedy)
        }
        _ => Check::ok("engines", found),
    }
}

#[cfg(not(all(target_os = "linux", feature = "uring")))]
fn ring(_: &Config) -> Vec<Check> {
    let remedy = "build for Linux with the cargo feature `uring`; the portable engine is used";
    vec![Check::warn("io_uring", "not part of this build", remedy)]
}

#[cfg(all(target_os = "linux", feature = "uring"))]
fn ring(config: &Config) -> Vec<Check> {
    use crate::config::EngineChoice::{TokioUring, Uring};
    use crate::engine::uring::setup;
    let insisted =
        matches!(config.engine, Uring | TokioUring) || config.fixed == crate::config::Switch::On;
    let sysctl = match io_mode::uring_disabled() {
        Some(level) => format!("kernel.io_uring_disabled = {level}"),
        None => "no sysctl kernel.io_uring_disabled".to_string(),
    };
    match setup::ring(config.queue_depth + 1) {
        Ok((ring, flags)) => {
            let up = format!("works, with flags {flags}; {sysctl}");
            vec![Check::ok("io_uring", up), operations(&ring)]
        }
        Err(error) => {
            let mode = io_mode::IoMode { engine: EngineKind::Uring, fixed: true, direct: true };
            let why = io_mode::refusal(&mode, io_mode::Stage::Start, &error);
            let (reason, remedy) =
                why.map_or((error.to_string(), String::new()), |why| (why.reason, why.remedy));
            let found =
                if reason.contains(&sysctl) { reason } else { format!("{reason}; {sysctl}") };
            vec![Check::short(insisted, "io_uring", found, remedy)]
        }
    }
}

#[cfg(all(target_os = "linux", feature = "uring"))]
fn operations(ring: &io_uring::IoUring) -> Check {
    use crate::engine::uring::setup::{OPERATIONS, missing_operations};
    let name = "io_uring operations";
    let upgrade = "use Linux 5.6 or later";
    match missing_operations(ring) {
        Ok(missing) if missing.is_empty() => {
            Check::ok(name, OPERATIONS.map(|(name, _)| name).join(", "))
        }
        Ok(missing) => Check::warn(name, format!("missing: {}", missing.join(", ")), upgrade),
        Err(error) => Check::warn(name, format!("the kernel does not say: {error}"), upgrade),
    }
}
