//! How much memory the machine, and the control groups of this process, still allow it to take.

use crate::sys::file::read_kernel_text;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where the kernel shows control groups.
const GROUPS: &str = "/sys/fs/cgroup";

/// A bound of the memory of this process and of others, and what is left below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// For messages: `"this machine"`, `"the control group /job"`.
    pub of: String,
    /// Equal for all processes under the same limit, and a file name.
    pub id: String,
    /// The limit.
    pub bytes: u64,
    /// Bytes that may be taken before the kernel swaps, or ends a process.
    pub available: u64,
}

/// The machine's memory, and each limit of a control group that this process is in.
///
/// # Errors
/// The system's, where the kernel does not say what is available.
pub fn limits() -> io::Result<Vec<Limit>> {
    let mut all = vec![machine(&read_kernel_text("/proc/meminfo")?)?];
    let groups = read_kernel_text("/proc/self/cgroup").unwrap_or_default();
    all.extend(groups_of(&groups, Path::new(GROUPS)).iter().filter_map(Group::limit));
    Ok(all)
}

/// The least limit of the control groups of this process; `None` if they have none.
#[cfg(feature = "cli")]
pub fn group_limit_bytes() -> Option<u64> {
    least_limit(&read_kernel_text("/proc/self/cgroup").unwrap_or_default(), Path::new(GROUPS))
}

#[cfg(any(test, feature = "cli"))]
fn least_limit(of_process: &str, mounted: &Path) -> Option<u64> {
    groups_of(of_process, mounted).iter().filter_map(Group::limit_bytes).min()
}

fn machine(meminfo: &str) -> io::Result<Limit> {
    let field = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (Some(bytes), Some(available)) = (field("MemTotal"), field("MemAvailable")) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "/proc/meminfo has no MemAvailable",
        ));
    };
    Ok(Limit { of: "this machine".into(), id: "machine".into(), bytes, available })
}

/// A control group whose memory may be limited.
struct Group {
    dir: PathBuf,
    /// Its path among the groups, for messages.
    name: String,
    files: &'static Files,
}

/// What a version of control groups calls its files.
struct Files {
    limits: &'static [&'static str],
    used: &'static str,
    /// What the kernel drops first when memory gets short, in `memory.stat`.
    dropped: &'static str,
}

/// Above `memory.high` the kernel slows a process down.
const VERSION_2: Files = Files {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    dropped: "inactive_file",
};
const VERSION_1: Files = Files {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    dropped: "total_inactive_file",
};

/// The control groups of a process and those above them, of either version. `of_process` is the content of
/// `/proc/self/cgroup`.
fn groups_of(of_process: &str, mounted: &Path) -> Vec<Group> {
    let of_line = |line: &str| -> Option<Vec<Group>> {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let (root, files) = match controllers {
            "" => (mounted.to_owned(), &VERSION_2),
            "memory" => (mounted.join("memory"), &VERSION_1),
            _ => return None,
        };
        let above = Path::new(group.trim_start_matches('/')).ancestors();
        let group = |group: &Path| Group {
            dir: root.join(group),
            name: format!("/{}", group.display()),
            files,
        };
        Some(above.map(group).collect())
    };
    of_process.lines().filter_map(of_line).flatten().collect()
}

impl Group {
    fn number(&self, file: &str) -> Option<u64> {
        // "max" is not a number, and means no limit.
        read_kernel_text(self.dir.join(file)).ok()?.trim().parse().ok()
    }

    fn limit_bytes(&self) -> Option<u64> {
        let least = self.files.limits.iter().filter_map(|file| self.number(file)).min();
        least.filter(|&limit| limit < 1 << 62) // version 1 shows the largest number of pages for no limit
    }

    fn limit(&self) -> Option<Limit> {
        let bytes = self.limit_bytes()?;
        let stat = read_kernel_text(self.dir.join("memory.stat")).unwrap_or_default();
        let dropped = stat.lines().find_map(|line| {
            line.strip_prefix(self.files.dropped)?.strip_prefix(' ')?.parse::<u64>().ok()
        });
        let used = self.number(self.files.used)?.saturating_sub(dropped.unwrap_or(0));
        let found = std::fs::metadata(&self.dir).ok()?;
        Some(Limit {
            of: format!("the control group {}", self.name),
            id: format!("group-{:x}-{:x}", found.dev(), found.ino()),
            bytes,
            available: bytes.saturating_sub(used),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::sys::memory::*;
    use std::fs;

    fn say(mounted: &Path, group: &str, file: &str, text: &str) {
        let group = mounted.join(group);
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join(file), text).unwrap();
    }

    #[test]
    fn the_least_limit_of_a_group_and_those_above_it_holds() {
        let mounted = tempfile::tempdir().unwrap();
        let say = |group: &str, file: &str, text: &str| say(mounted.path(), group, file, text);
        let limit = |of_process| least_limit(of_process, mounted.path());
        assert_eq!(limit("0::/\n"), None);
        say("job", "memory.max", "1000000\n");
        say("job/rank", "memory.max", "max\n");
        assert_eq!(limit("0::/job/rank\n"), Some(1_000_000));
        assert_eq!(limit("0::/\n"), None);
        assert_eq!(limit("0::/../elsewhere\n"), None);
        say("memory", "memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit("3:cpu,cpuacct:/\n2:memory:/\n0::/\n"), None);
        say("memory/box", "memory.limit_in_bytes", "4096\n");
        assert_eq!(limit("3:cpu,cpuacct:/\n2:memory:/box\n0::/\n"), Some(4096));
        assert_eq!(limit("rubbish"), None);
    }

    #[test]
    fn what_a_group_has_left_is_its_limit_less_what_it_uses_and_cannot_drop() {
        let mounted = tempfile::tempdir().unwrap();
        let say = |group: &str, file: &str, text: &str| say(mounted.path(), group, file, text);
        say("job", "memory.max", "max\n");
        say("job", "memory.high", "9000\n");
        say("job", "memory.current", "7000\n");
        say("job", "memory.stat", "anon 1\ninactive_file 3000\nactive_file 500\n");
        say("job/rank", "memory.max", "4000\n");
        say("job/rank", "memory.current", "5000\n");
        let groups = groups_of("0::/job/rank\n", mounted.path());
        let limits: Vec<Limit> = groups.iter().filter_map(Group::limit).collect();
        let told: Vec<(&str, u64, u64)> =
            limits.iter().map(|limit| (limit.of.as_str(), limit.bytes, limit.available)).collect();
        assert_eq!(
            told,
            [("the control group /job/rank", 4000, 0), ("the control group /job", 9000, 5000)]
        );
        assert_ne!(limits[0].id, limits[1].id);
        say("memory/box", "memory.limit_in_bytes", "8000\n");
        say("memory/box", "memory.usage_in_bytes", "6000\n");
        say("memory/box", "memory.stat", "total_inactive_file 1000\n");
        let old = groups_of("4:memory:/box\n", mounted.path());
        assert_eq!(old[0].limit().map(|limit| limit.available), Some(3000));
    }

    #[test]
    fn the_machine_says_what_is_available() {
        let found = machine("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:   5 kB\n").unwrap();
        assert_eq!((found.bytes, found.available), (8192, 5120));
        assert!(machine("MemTotal: 8 kB\n").is_err());
        assert!(limits().unwrap()[0].available > 0);
    }
}
