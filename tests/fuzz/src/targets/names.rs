//! Names of checkpoints and of files, and step patterns: a pattern and a name, each a line.

use ringstow::StepPattern;
use ringstow::internals::format::names;
use ringstow::internals::format::step::StepName;

pub fn run(data: &[u8]) {
    let (pattern, name) = match data.iter().position(|&byte| byte == b'\n') {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (&b""[..], data),
    };
    // No file system has longer names.
    let name = &name[..name.len().min(255)];
    if let Ok(pattern) = std::str::from_utf8(pattern)
        && let Ok(pattern) = pattern.parse::<StepPattern>()
    {
        let again: StepPattern = pattern.to_string().parse().expect("a pattern is a pattern");
        assert_eq!(again, pattern);
        assert_eq!(again.step_in(name), pattern.step_in(name));
    }
    check_step(name);
    if let Ok(name) = std::str::from_utf8(name) {
        check_file(name);
    }
}

/// The row that a name is in, written as a pattern, has the name's step.
fn check_step(name: &[u8]) {
    let Ok(StepName { stem, step }) = StepName::of(name) else { return };
    let _ = stem.counts_steps();
    let text = stem.to_string();
    // These have a meaning in patterns; what is not UTF-8 is shown replaced.
    if name.iter().any(|byte| b"*{/".contains(byte)) || std::str::from_utf8(name).is_err() {
        return;
    }
    let pattern: StepPattern = text.parse().unwrap_or_else(|why| panic!("{text:?}: {why}"));
    assert_eq!(pattern.step_in(name), Some(step), "{text:?}");
}

/// The names of files contradict each other nowhere.
fn check_file(name: &str) {
    let uncommitted = names::uncommitted(name);
    if names::is_shard(name) {
        assert!(!names::is_uncommitted(name) && names::is_uncommitted(&uncommitted));
        assert_eq!(names::committed(&uncommitted), name);
        assert!(names::is_trace(name) && names::is_trace(&uncommitted));
        let recycled = names::recycled(name).expect("a shard can be recycled");
        assert!(names::is_recycled(&recycled) && !names::is_shard(&recycled));
        let _ = (names::generation(name), names::shard_rank(name));
    }
    if let Some((shard, write)) = names::split_write(name) {
        assert!(names::is_uncommitted(name));
        assert_eq!(names::uncommitted_write(shard, write), name);
        assert_eq!(names::committed(name), shard);
    }
    if let Some(rank) = names::dir_rank(name) {
        assert_eq!(names::rank_dir(rank), name);
        assert!(names::is_rank_dir(name));
    }
    if names::is_uncommitted_model(name) {
        assert!(!names::is_uncommitted(name));
    }
    if let Some((stem, index, count)) = names::numbered(name) {
        assert!(name.starts_with(stem) && index.max(count) > 0 || index + count == 0);
    }
    if let Some(rank) = names::done_rank(name) {
        assert!(names::is_uncommitted(&names::done(rank)));
    }
    if names::is_confined(name) {
        let path = std::path::Path::new(name);
        assert_eq!(path.components().count(), 1);
        assert_eq!(path.file_name().and_then(|name| name.to_str()), Some(name));
    }
    let _ = (names::is_uncommitted_stripe_marker(name), names::is_recycled(name));
}
