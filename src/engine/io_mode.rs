//! Which I/O mode to try first, what the failure of one means, and what to report to the user. Pure but for two small trial transfers and one look at a sysctl.

use super::fallback::Refusal;
use super::queue::{Attached, Outcome, Queue};
use super::{Action, Transfer};
use crate::config::{Config, EngineChoice, Switch};
use crate::error::{Error, Result, is_one_of, is_unsupported};
use crate::limits::ALIGN;
use crate::pool::Buffer;
use crate::sys::file::read_kernel_text;
use crate::sys::memlock;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use std::{fmt, io};

/// An engine by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// io_uring.
    Uring,
    /// Threads with positioned reads and writes.
    Portable,
    /// io_uring through tokio-uring. Used only where it is chosen by name.
    #[serde(rename = "tokio-uring")]
    TokioUring,
}

impl EngineKind {
    /// All engines, in the order in which they are tried.
    pub const ALL: [Self; 3] = [Self::Uring, Self::Portable, Self::TokioUring];

    /// As in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Portable => "portable",
            Self::TokioUring => "tokio-uring",
        }
    }

    /// Whether this build has it.
    pub fn is_built(self) -> bool {
        let linux = cfg!(target_os = "linux");
        match self {
            Self::Uring => linux && cfg!(feature = "uring"),
            Self::Portable => true,
            Self::TokioUring => linux && cfg!(feature = "tokio-uring"),
        }
    }
}

/// One way of doing I/O: an engine, and how it uses memory and files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IoMode {
    /// The engine that moves the bytes.
    pub engine: EngineKind,
    /// Whether the pool is registered with the kernel.
    pub fixed: bool,
    /// Whether files are opened with O_DIRECT.
    pub direct: bool,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fixed = if self.fixed { "fixed buffers, " } else { "" };
        let direct = if self.direct { "O_DIRECT" } else { "buffered" };
        write!(f, "{}, {fixed}{direct}", self.engine.name())
    }
}

/// The modes to try, best first: io_uring with fixed buffers, without, then the portable engine,
/// all direct; then buffered. A mode that the caller's choices exclude is left out.
///
/// # Errors
/// [`Error::Invalid`] for choices that contradict each other, [`Error::Unsupported`] for an engine
/// that this build does not have.
pub fn modes(config: &Config) -> Result<Vec<IoMode>> {
    modes_of(config, EngineKind::is_built)
}

fn modes_of(config: &Config, is_built: impl Fn(EngineKind) -> bool) -> Result<Vec<IoMode>> {
    use EngineKind::{Portable, TokioUring, Uring};
    config.validate()?;
    let engines: &[EngineKind] = match config.engine {
        EngineChoice::TokioUring => &[TokioUring], // never falls back to another engine
        EngineChoice::Portable => &[Portable],
        EngineChoice::Auto if config.fixed != Switch::On => match is_built(Uring) {
            true => &[Uring, Portable],
            false => &[Portable],
        },
        EngineChoice::Uring | EngineChoice::Auto => &[Uring],
    };
    if let Some(&missing) = engines.iter().find(|&&engine| !is_built(engine)) {
        return Err(not_built(missing));
    }
    let mut modes = Vec::new();
    for (step, &direct) in choices(config.direct).iter().enumerate() {
        for &engine in engines {
            // The page cache takes several copying threads better than one ring: where io_uring is not
            // insisted on, the step from direct to buffered is the portable engine's.
            if step > 0 && engines.len() > 1 && engine == Uring {
                continue;
            }
            let fixed = if engine == Portable { &[false] } else { choices(config.fixed) };
            modes.extend(fixed.iter().map(|&fixed| IoMode { engine, fixed, direct }));
        }
    }
    Ok(modes)
}

/// The error for an engine that the configuration insists on and this build does not have.
fn not_built(engine: EngineKind) -> Error {
    let (what, remedy) = match engine {
        EngineKind::TokioUring => (
            "this build of ringstow has no tokio-uring engine, which Config.engine = tokio-uring asks for (the \
             Python wheel never has)",
            "build for Linux with the cargo feature `tokio-uring`, or set engine = uring, which is as fast",
        ),
        _ => (
            "this build of ringstow has no io_uring engine, which Config.engine = uring or Config.fixed = on asks for",
            "build for Linux with the cargo feature `uring`, or leave both on auto",
        ),
    };
    Error::Unsupported { what: what.into(), remedy: remedy.into() }
}

/// The settings that a switch allows, preferred first.
fn choices(switch: Switch) -> &'static [bool] {
    match switch {
        Switch::Auto => &[true, false],
        Switch::On => &[true],
        Switch::Off => &[false],
    }
}

/// The stage at which a mode failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Building the engine.
    Start,
    /// Opening the file.
    Open,
    /// The trial transfer.
    Trial,
}

/// What an error says about a mode. `None`: it is not the mode's fault (no space, no permission, a
/// failing disk), the next one would fail as well, and the error is to be reported as it is.
pub fn refusal(mode: &IoMode, stage: Stage, error: &io::Error) -> Option<Refusal> {
    if let Some(known) = Refusal::in_error(error) {
        return Some(known.clone());
    }
    match stage {
        Stage::Start if mode.engine == EngineKind::Portable => None,
        Stage::Start => Some(no_ring(error)),
        Stage::Open | Stage::Trial => no_transfer(mode, error),
    }
}

/// Why there is no ring.
fn no_ring(error: &io::Error) -> Refusal {
    let portable = "or set engine = portable";
    match error.kind() {
        io::ErrorKind::PermissionDenied => match uring_disabled() {
            Some(level @ (1 | 2)) => Refusal::new(
                format!("io_uring is switched off: sysctl kernel.io_uring_disabled = {level}"),
                format!("`sysctl kernel.io_uring_disabled=0` as root, {portable}"),
            ),
            _ => Refusal::new(
                format!(
                    "io_uring is denied ({error}), most likely by a container's seccomp filter"
                ),
                format!(
                    "run the container with a seccomp profile that allows io_uring_setup, \
                     io_uring_enter and io_uring_register (docker: `--security-opt \
                     seccomp=PROFILE.json`, or `seccomp=unconfined`), {portable}"
                ),
            ),
        },
        io::ErrorKind::Unsupported => Refusal::new(
            format!("this kernel has no usable io_uring ({error})"),
            format!("use Linux 5.6 or later, built with CONFIG_IO_URING, {portable}"),
        ),
        _ if is_one_of(error, &[Errno::ENOMEM]) => Refusal::new(
            format!("no memory for a ring ({error}): RLIMIT_MEMLOCK, or a memory cgroup"),
            memlock::remedy(16 << 20),
        ),
        _ if is_one_of(error, &[Errno::EMFILE]) => Refusal::new(
            format!("no file descriptor left for a ring ({error})"),
            "raise `ulimit -n`".to_string(),
        ),
        _ => Refusal::new(
            format!("the ring could not be set up: {error}"),
            format!("see `ringstow doctor`, {portable}"),
        ),
    }
}

/// Why a mode cannot move bytes to or from this file, if that is the mode's fault.
fn no_transfer(mode: &IoMode, error: &io::Error) -> Option<Refusal> {
    if mode.direct && (is_unsupported(error) || is_one_of(error, &[Errno::EINVAL])) {
        return Some(Refusal::new(
            format!("the file system does not take O_DIRECT ({error})"),
            "save to a file system with direct I/O (ext4, XFS, btrfs, NFS), or set direct = off",
        ));
    }
    if mode.fixed && is_one_of(error, &[Errno::EFAULT, Errno::EOPNOTSUPP]) {
        return Some(Refusal::new(
            format!("the file system does not take fixed buffers ({error})"),
            "set fixed = off",
        ));
    }
    None
}

/// `kernel.io_uring_disabled`: 0 allowed, 1 for privileged groups only, 2 for nobody. `None` on
/// kernels without it (before 6.6).
pub(crate) fn uring_disabled() -> Option<u32> {
    read_kernel_text("/proc/sys/kernel/io_uring_disabled").ok()?.trim().parse().ok()
}

/// The error when every mode failed: each reason with the modes that it ruled out, and each remedy
/// once.
pub fn none_left(failed: &[(IoMode, Refusal)]) -> Error {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    let mut remedies: Vec<&str> = Vec::new();
    for (mode, Refusal { reason, remedy }) in failed {
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, modes)) => modes.push(mode.to_string()),
            None => reasons.push((reason, vec![mode.to_string()])),
        }
        if !remedies.contains(&remedy.as_str()) {
            remedies.push(remedy);
        }
    }
    let causes: Vec<_> =
        reasons.iter().map(|(why, modes)| format!("{why} (tried: {})", modes.join("; "))).collect();
    Error::Unsupported { what: causes.join("; "), remedy: remedies.join("; ") }
}

/// What [`trial`] does with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trial {
    /// Writes to it, from this byte offset on.
    Write(u64),
    /// Reads its start; the file may be shorter.
    Read,
}

/// Writes the first [`ALIGN`] bytes of a buffer to a file, or reads them: some file systems take O_DIRECT at open and
/// refuse it here. The buffer is lost only with the engine.
pub fn trial(queue: &Queue, file: &Attached, trial: Trial, buffer: Buffer) -> Outcome {
    let of = |offset| Transfer::of(buffer, ALIGN, offset);
    match trial {
        Trial::Write(offset) => queue.start_one(file, Action::Write(of(offset)), ALIGN).wait(),
        Trial::Read => queue.start_one(file, Action::Read(of(0)), 0).wait(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_those_of_the_callers_choices_best_first() {
        use EngineChoice::{Auto, Portable, TokioUring, Uring};
        use Switch::{Auto as Either, Off, On};
        let cases: [(EngineChoice, Switch, Switch, &[&str]); 8] = [
            (
                Auto,
                Either,
                Either,
                &[
                    "uring, fixed buffers, O_DIRECT",
                    "uring, O_DIRECT",
                    "portable, O_DIRECT",
                    "portable, buffered",
                ],
            ),
            (Uring, On, On, &["uring, fixed buffers, O_DIRECT"]),
            (Uring, Off, Off, &["uring, buffered"]),
            (Uring, Off, Either, &["uring, O_DIRECT", "uring, buffered"]),
            (
                Auto,
                On,
                Either,
                &["uring, fixed buffers, O_DIRECT", "uring, fixed buffers, buffered"],
            ),
            (Portable, Either, On, &["portable, O_DIRECT"]),
            (
                TokioUring,
                Either,
                Either,
                &[
                    "tokio-uring, fixed buffers, O_DIRECT",
                    "tokio-uring, O_DIRECT",
                    "tokio-uring, fixed buffers, buffered",
                    "tokio-uring, buffered",
                ],
            ),
            (TokioUring, Off, On, &["tokio-uring, O_DIRECT"]),
        ];
        for (engine, fixed, direct, expected) in cases {
            let config = Config { engine, fixed, direct, ..Config::default() };
            let modes = modes_of(&config, |_| true).unwrap();
            assert_eq!(modes.iter().map(IoMode::to_string).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_build_refuses_engines_that_it_does_not_have() {
        let without = |kind| kind == EngineKind::Portable;
        let auto = modes_of(&Config::default(), without).unwrap();
        assert_eq!(auto.len(), 2);
        assert!(auto.iter().all(|mode| mode.engine == EngineKind::Portable));
        for (engine, feature) in
            [(EngineChoice::Uring, "uring"), (EngineChoice::TokioUring, "tokio-uring")]
        {
            let refused = modes_of(&Config { engine, ..Config::default() }, without).unwrap_err();
            assert!(matches!(refused, Error::Unsupported { .. }));
            assert!(
                refused.to_string().contains(&format!("cargo feature `{feature}`")),
                "{refused}"
            );
        }
    }

    #[test]
    fn portable_engine_with_fixed_buffers_is_refused() {
        let config =
            Config { engine: EngineChoice::Portable, fixed: Switch::On, ..Config::default() };
        assert!(matches!(modes(&config), Err(Error::Invalid { .. })));
    }

    #[test]
    fn only_errors_another_mode_can_fix_cause_fallback() {
        let direct = IoMode { engine: EngineKind::Uring, fixed: true, direct: true };
        let buffered = IoMode { engine: EngineKind::Portable, fixed: false, direct: false };
        let errno = io::Error::from_raw_os_error;
        assert!(refusal(&direct, Stage::Trial, &errno(nix::libc::EINVAL)).is_some());
        assert!(refusal(&buffered, Stage::Trial, &errno(nix::libc::EINVAL)).is_none());
        assert!(refusal(&direct, Stage::Trial, &errno(nix::libc::ENOSPC)).is_none());
        assert!(refusal(&direct, Stage::Open, &errno(nix::libc::EACCES)).is_none());
        assert!(refusal(&direct, Stage::Start, &errno(nix::libc::EACCES)).is_some());
    }

    #[test]
    fn error_of_last_mode_names_each_reason_and_remedy_once() {
        let mode = IoMode { engine: EngineKind::Uring, fixed: true, direct: true };
        let other = IoMode { fixed: false, ..mode };
        let why = Refusal::new("denied", "allow it");
        let text = none_left(&[(mode, why.clone()), (other, why)]).to_string();
        assert_eq!(
            text,
            "denied (tried: uring, fixed buffers, O_DIRECT; uring, O_DIRECT); allow it"
        );
    }
}
