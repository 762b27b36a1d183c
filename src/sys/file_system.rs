//! Which file system a path is on, whether other hosts may use it too, and whether locks reach them.
//!
//! The kernel does not say whether a lock keeps other hosts out, so this file lists what is known. A file system that is
//! not in a list counts as one that other hosts may use and that locks do not reach.

use crate::sys::seam::{Call, made};
use std::fs::File;
use std::io;
use std::path::Path;

/// The file system of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// The kernel's name for its type (`ext4`, `nfs4`, `fuse.sshfs`), or `type 0x…` if only the number is known.
    pub name: String,
    /// Which hosts may use it.
    pub hosts: Hosts,
    /// Whom a lock keeps out. [`Reach::EveryHost`] if no other host exists.
    pub locks: Reach,
    /// Why locks reach other hosts or do not, as a sentence; and what to do if they do not.
    pub why: String,
}

/// The name of this host, for people.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Which hosts may use a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hosts {
    /// This one alone.
    One,
    /// Others, too: it is a network or cluster file system.
    Many,
    /// The type does not tell: FUSE, 9p, anything new.
    Unknown,
}

/// Whom a lock keeps out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Processes of every host that may use the file system.
    EveryHost,
    /// Processes of this host at best.
    ThisHost,
}

#[cfg(target_os = "linux")]
const TMPFS: u64 = 0x0102_1994;
#[cfg(target_os = "linux")]
const RAMFS: u64 = 0x8584_58f6;

/// Types that one host has for itself, by the numbers in statfs.
#[cfg(target_os = "linux")]
const ONE_HOST: &[(u64, &str)] = &[
    (0xef53, "ext4"), // ext2 and ext3, too
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0xf2f5_2010, "f2fs"),
    (0xca45_1a4e, "bcachefs"),
    (0x2fc1_2fc1, "zfs"),
    (TMPFS, "tmpfs"),
    (RAMFS, "ramfs"),
    // In layers over other directories. Where it writes cannot be on a network file system.
    (0x794c_7630, "overlay"),
    (0x3153_464a, "jfs"),
    (0x5265_4973, "reiserfs"),
    (0x3434, "nilfs2"),
    (0x4d44, "vfat"),
    (0x2011_bab0, "exfat"),
    (0x7366_746e, "ntfs3"),
    (0x482b, "hfsplus"),
    (0x1501_3346, "udf"),
    (0x2405_1905, "ubifs"),
    (0x5346_4846, "wslfs"), // WSL 1; lxfs, too
];

/// Types that one host has for itself, by the mount's name: their number in statfs is FUSE's.
const ONE_HOST_NAMES: &[&str] = &["fuseblk"]; // on a block device: ntfs-3g

/// Types that keep their files in a directory of any other file system, which is their mount's source. (That of overlay
/// cannot be on a network file system; aufs does not name its.)
const OVER_A_DIRECTORY: &[&str] = &["ecryptfs"];

/// A network file system whose kernel module passes a lock on a file (`fcntl`) on to other hosts.
#[derive(Debug)]
struct PassesLocks {
    names: &'static [&'static str],
    /// Only with this mount option.
    needs: Option<&'static str>,
    /// Not with any of these.
    forbids: &'static [&'static str],
}

const PASS_LOCKS: &[PassesLocks] = &[
    PassesLocks {
        names: &["nfs", "nfs4"],
        needs: None,
        forbids: &["nolock", "local_lock=all", "local_lock=posix"],
    },
    PassesLocks { names: &["cifs", "smb3"], needs: None, forbids: &["nobrl"] },
    PassesLocks { names: &["lustre"], needs: Some("flock"), forbids: &["localflock", "noflock"] },
    PassesLocks { names: &["ceph"], needs: None, forbids: &[] },
    PassesLocks { names: &["gpfs"], needs: None, forbids: &[] },
];

/// Other network and cluster file systems. Theirs depends on what a client cannot see, or never reaches other hosts.
const OTHER_NETWORK: &[&str] = &[
    "afs",
    "beegfs",
    "fuse.blobfuse2",
    "fuse.ceph",
    "fuse.gcsfuse",
    "fuse.glusterfs",
    "fuse.goofys",
    "fuse.juicefs",
    "fuse.mfs",
    "fuse.mount-s3",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.sshfs",
    "gfs2",
    "ncpfs",
    "ocfs2",
    "panfs",
    "pvfs2",
    "wekafs",
];

impl FileSystem {
    /// The file system of an existing path.
    ///
    /// # Errors
    /// The system's.
    pub fn of(path: &Path) -> io::Result<Self> {
        Self::of_open(&made(Call::Open, path, || File::open(path))?)
    }

    /// That of a path, or of the directory in which it would be, if other hosts may use it.
    pub fn shared(path: &Path) -> Option<Self> {
        path.ancestors().map(Self::of).find_map(Result::ok).filter(Self::is_shared)
    }

    /// The file system of an open file or directory.
    ///
    /// # Errors
    /// The system's.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_open(open: &File) -> io::Result<Self> {
        let number = number_of(open)?;
        #[cfg(any(debug_assertions, test))]
        if let Some(played) = played::on(open) {
            return Ok(played);
        }
        if let Some((_, name)) = ONE_HOST.iter().find(|(known, _)| *known == number) {
            return Ok(Self::of_one_host((*name).into()));
        }
        Ok(match mount_of(open) {
            Some(Mount { name, source, .. }) if OVER_A_DIRECTORY.contains(&&*name) => {
                Self::over(name, Self::below(Path::new(&source)))
            }
            Some(Mount { name, options, .. }) => Self::mounted(name, &options),
            None => Self::mounted(format!("type {number:#x}"), ""),
        })
    }

    /// Off Linux, file systems are not told apart, and other hosts are not expected.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn of_open(open: &File) -> io::Result<Self> {
        made(Call::Query, open, || Ok(Self::of_one_host("unknown".into())))
    }

    /// That of the directory that another file system lies over. None if it lies over itself, as `mount -t ecryptfs /x
    /// /x` makes it: the directory below has no path any more.
    #[cfg(target_os = "linux")]
    fn below(source: &Path) -> Option<Self> {
        let open = made(Call::Open, source, || File::open(source)).ok()?;
        match mount_of(&open) {
            Some(mount) if OVER_A_DIRECTORY.contains(&&*mount.name) => None,
            _ => Self::of_open(&open).ok(),
        }
    }

    fn of_one_host(name: String) -> Self {
        let why = format!("{name} is used by this host alone");
        Self { name, hosts: Hosts::One, locks: Reach::EveryHost, why }
    }

    fn without_known_locks(name: String, hosts: Hosts) -> Self {
        let why = format!("ringstow cannot know whether {name} passes locks on to other hosts");
        Self { name, hosts, locks: Reach::ThisHost, why }
    }

    /// One that the number in statfs does not tell: other hosts may use it, unless its name says that they do not.
    fn mounted(name: String, options: &str) -> Self {
        let is = |names: &[&str]| names.contains(&name.as_str());
        if is(ONE_HOST_NAMES) {
            return Self::of_one_host(name);
        }
        let known = PASS_LOCKS.iter().find(|known| is(known.names));
        let (locks, why) = match known.map(|known| known.obstacle(options)) {
            Some(None) => (Reach::EveryHost, format!("{name} passes locks on to other hosts")),
            Some(Some(obstacle)) => {
                let mounted = "does not pass locks on to other hosts as it is mounted here";
                (Reach::ThisHost, format!("{name} {mounted}: {obstacle}"))
            }
            None if is(OTHER_NETWORK) => return Self::without_known_locks(name, Hosts::Many),
            None => return Self::without_known_locks(name, Hosts::Unknown),
        };
        Self { name, hosts: Hosts::Many, locks, why }
    }

    /// One that keeps its files in a directory of another file system, `lower` if that is known: the same hosts may use
    /// it. Nobody knows whether it passes locks on.
    fn over(name: String, lower: Option<Self>) -> Self {
        match lower.map_or(Hosts::Unknown, |lower| lower.hosts) {
            Hosts::One => Self::of_one_host(name),
            hosts => Self::without_known_locks(name, hosts),
        }
    }

    /// Whether other hosts may use it.
    pub fn is_shared(&self) -> bool {
        self.hosts != Hosts::One
    }
}

/// The number of a file system's type.
#[cfg(target_os = "linux")]
fn number_of(open: &File) -> io::Result<u64> {
    let found = made(Call::Query, open, || Ok(rustix::fs::fstatfs(open)?))?;
    // The kernel's field has 32 or 64 bits, with a sign.
    Ok(found.f_type as u64 & 0xffff_ffff)
}

/// Whether an open file's bytes are memory (tmpfs, ramfs): a transfer is a copy by the CPU.
#[cfg(all(target_os = "linux", feature = "uring"))]
pub(crate) fn is_in_memory(open: &File) -> bool {
    matches!(number_of(open), Ok(TMPFS | RAMFS))
}

impl PassesLocks {
    /// Which mount option keeps locks on this host.
    fn obstacle(&self, options: &str) -> Option<String> {
        let has = |wanted: &str| options.split(',').any(|option| option == wanted);
        if let Some(option) = self.forbids.iter().find(|option| has(option)) {
            return Some(format!("mount it without `{option}`"));
        }
        self.needs
            .filter(|option| !has(option))
            .map(|option| format!("mount it with `-o {option}`"))
    }
}

/// A mount, by the kernel's list.
#[cfg(target_os = "linux")]
struct Mount {
    name: String,
    source: String,
    options: String,
}

/// The mount that an open file or directory is on.
#[cfg(target_os = "linux")]
fn mount_of(open: &File) -> Option<Mount> {
    use crate::sys::file::read_kernel_text;
    use std::os::fd::AsRawFd;
    let info = read_kernel_text(format!("/proc/self/fdinfo/{}", open.as_raw_fd())).ok()?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    // A thread may have a mount namespace of its own.
    let mounts = read_kernel_text("/proc/thread-self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').next() == Some(id))?;
    // Type, source and options follow a dash; the fields before it vary in number.
    let mut fields = mount.split(" - ").nth(1)?.split(' ');
    let (name, source) = (fields.next()?.into(), fields.next()?.into());
    Some(Mount { name, source, options: fields.next().unwrap_or_default().into() })
}

#[cfg(all(any(debug_assertions, test), target_os = "linux"))]
pub use played::{Played, play};

/// Tests play file systems that the machine does not have.
#[cfg(all(any(debug_assertions, test), target_os = "linux"))]
mod played {
    use crate::sys::file_system::FileSystem;
    use crate::sys::seam::Subject;
    use std::fs::File;
    use std::path::{Path, PathBuf};
    use std::sync::{LazyLock, Mutex, PoisonError};

    type All = Vec<(PathBuf, FileSystem)>;

    static PLAYED: LazyLock<Mutex<All>> = LazyLock::new(|| Mutex::new(from_environment()));

    /// Ends the play when it is dropped.
    #[must_use = "dropped, it plays nothing"]
    pub struct Played(PathBuf);

    /// Makes `dir`, which exists, and all below it count as a shared file system of this type, mounted with these
    /// options, in this process. `RINGSTOW_TEST_FILE_SYSTEM=nfs4:nolock:/dir` does it in a child process.
    pub fn play(dir: &Path, name: &str, options: &str) -> Played {
        let dir = std::fs::canonicalize(dir).expect("a directory that exists");
        let played = FileSystem::mounted(name.into(), options);
        all(|all| all.push((dir.clone(), played)));
        Played(dir)
    }

    impl Drop for Played {
        fn drop(&mut self) {
            all(|all| {
                let last = all.iter().rposition(|(dir, _)| *dir == self.0);
                last.map(|last| all.remove(last));
            });
        }
    }

    /// The innermost directory that is played above an open file, and among several the last.
    pub fn on(open: &File) -> Option<FileSystem> {
        all(|all| {
            let path = (!all.is_empty()).then(|| open.path())?;
            let above = all.iter().filter(|(dir, _)| path.starts_with(dir));
            above.max_by_key(|(dir, _)| dir.as_os_str().len()).map(|(_, played)| played.clone())
        })
    }

    fn all<T>(with: impl FnOnce(&mut All) -> T) -> T {
        with(&mut PLAYED.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn from_environment() -> All {
        let Ok(asked) = std::env::var("RINGSTOW_TEST_FILE_SYSTEM") else { return All::new() };
        let mut words = asked.splitn(3, ':');
        let (Some(name), Some(options), Some(dir)) = (words.next(), words.next(), words.next())
        else {
            panic!("RINGSTOW_TEST_FILE_SYSTEM is {asked:?}: NAME:OPTIONS:DIRECTORY");
        };
        let dir = std::fs::canonicalize(dir).expect("a directory that exists");
        vec![(dir, FileSystem::mounted(name.into(), options))]
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use crate::sys::file_system::*;

    fn mounted(name: &str, options: &str) -> (Hosts, Reach) {
        let found = FileSystem::mounted(name.into(), options);
        (found.hosts, found.locks)
    }

    #[test]
    fn disk_of_this_host_is_not_shared() {
        let found = FileSystem::of(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(!found.is_shared() && found.locks == Reach::EveryHost, "{found:?}");
    }

    #[test]
    #[cfg(feature = "uring")]
    fn only_files_of_tmpfs_and_ramfs_are_in_memory() {
        use nix::sys::memfd::{MFdFlags, memfd_create};
        let memory = memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap();
        assert!(is_in_memory(&File::from(memory))); // the kernel keeps it in a tmpfs of its own
        assert!(!is_in_memory(&File::open(env!("CARGO_MANIFEST_DIR")).unwrap()));
        assert!(!is_in_memory(&File::open("/proc").unwrap()));
    }

    #[test]
    fn unlisted_file_system_may_be_shared_and_has_its_name_from_the_mount() {
        let found = FileSystem::of(Path::new("/proc")).unwrap();
        assert_eq!(found.name, "proc");
        assert_eq!((found.hosts, found.locks), (Hosts::Unknown, Reach::ThisHost));
        assert!(found.why.contains("whether proc passes locks on"), "{found:?}");
    }

    #[test]
    fn mount_options_decide_whether_locks_reach_other_hosts() {
        let many = |reach| (Hosts::Many, reach);
        for (name, options, reach) in [
            ("nfs4", "rw,vers=4.2,local_lock=none", Reach::EveryHost),
            ("nfs", "rw,nolock,local_lock=all", Reach::ThisHost),
            ("nfs4", "local_lock=posix", Reach::ThisHost),
            ("nfs", "local_lock=flock", Reach::EveryHost),
            ("cifs", "rw", Reach::EveryHost),
            ("smb3", "rw,nobrl", Reach::ThisHost),
            ("lustre", "rw,flock", Reach::EveryHost),
            ("lustre", "rw,localflock", Reach::ThisHost),
            ("lustre", "rw", Reach::ThisHost),
            ("ceph", "", Reach::EveryHost),
            ("gpfs", "", Reach::EveryHost),
            ("beegfs", "", Reach::ThisHost),
            ("fuse.sshfs", "", Reach::ThisHost),
        ] {
            assert_eq!(mounted(name, options), many(reach), "{name} {options}");
        }
        for name in ["fuse", "9p", "virtiofs", "type 0x1234"] {
            assert_eq!(mounted(name, ""), (Hosts::Unknown, Reach::ThisHost), "{name}");
        }
    }

    #[test]
    fn tables_know_local_and_network_kinds() {
        assert_eq!(mounted("fuseblk", "rw"), (Hosts::One, Reach::EveryHost));
        for kind in
            ["blobfuse2", "gcsfuse", "goofys", "juicefs", "mfs", "mount-s3", "rclone", "s3fs"]
        {
            let name = format!("fuse.{kind}");
            assert_eq!(mounted(&name, "rw"), (Hosts::Many, Reach::ThisHost), "{name}");
        }
        for (number, name) in [
            (0x482b, "hfsplus"),
            (0x1501_3346, "udf"),
            (0x2405_1905, "ubifs"),
            (0x5346_4846, "wslfs"),
        ] {
            assert!(ONE_HOST.contains(&(number, name)), "{name}");
        }
    }

    #[test]
    fn file_system_over_a_directory_is_shared_as_that_is() {
        let root = tempfile::tempdir().unwrap();
        let over = || {
            let found = FileSystem::over("ecryptfs".into(), FileSystem::of(root.path()).ok());
            (found.hosts, found.locks)
        };
        assert_eq!(over(), (Hosts::One, Reach::EveryHost));
        let _network = play(root.path(), "nfs4", "");
        assert_eq!(over(), (Hosts::Many, Reach::ThisHost));
        let unknown = FileSystem::over("ecryptfs".into(), None);
        assert_eq!((unknown.hosts, unknown.locks), (Hosts::Unknown, Reach::ThisHost));
        // Their kernel says nothing about the directories: any may be on a network file system.
        assert_eq!(mounted("aufs", "rw,si=1"), (Hosts::Unknown, Reach::ThisHost));
        assert!(ONE_HOST.contains(&(0x794c_7630, "overlay")));
    }

    #[test]
    fn remedy_names_the_mount_option() {
        let why = |name: &str, options: &str| FileSystem::mounted(name.into(), options).why;
        assert!(why("lustre", "rw").ends_with("mount it with `-o flock`"));
        assert!(why("nfs", "nolock").ends_with("mount it without `nolock`"));
        assert!(why("nfs4", "").contains("passes locks on"));
        assert!(why("fuse", "").contains("cannot know"));
    }

    #[test]
    fn played_file_system_holds_below_its_directory_until_dropped() {
        let root = tempfile::tempdir().unwrap();
        let (below, beside) = (root.path().join("a/b"), root.path().join("c"));
        std::fs::create_dir_all(&below).unwrap();
        std::fs::create_dir(&beside).unwrap();
        let playing = play(&root.path().join("a"), "nfs4", "nolock");
        assert_eq!(FileSystem::of(&below).unwrap().name, "nfs4");
        assert!(!FileSystem::of(&beside).unwrap().is_shared());
        drop(playing);
        assert!(!FileSystem::of(&below).unwrap().is_shared());
    }
}
