//! The rig keeps its promises, and makes no others.

use crate::with_hosts;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use two_hosts::{Rules, Share};

pub const STALE: Rules =
    Rules { stale_requests: 1 << 40, direct: true, lose_every: 0, shared_locks: false };

pub fn both(share: &Share, name: &str) -> [PathBuf; 2] {
    share.hosts().each_ref().map(|host| host.path().join(name))
}

fn names(dir: &std::path::Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn host_sees_its_own_changes_at_once_and_others_late() {
    with_hosts(STALE, 1, |share| {
        let ([a, b], [dir_a, dir_b]) = (both(share, "file"), both(share, ""));
        assert_eq!((names(&dir_b), b.exists()), (0, false));
        fs::write(&a, "text").unwrap();
        assert_eq!((names(&dir_a), a.exists()), (1, true));
        assert_eq!((names(&dir_b), b.exists()), (0, false));
        share.refresh();
        assert_eq!((names(&dir_b), fs::metadata(&b).unwrap().len()), (1, 4));
        fs::write(&a, "longer text").unwrap();
        assert_eq!(fs::metadata(&b).unwrap().len(), 4);
        // Opening asks the server.
        assert_eq!(fs::read_to_string(&b).unwrap(), "longer text");
        fs::remove_file(&a).unwrap();
        assert!(b.exists());
        assert_eq!(errno(File::open(&b)), libc::ENOENT);
    });
}

#[test]
fn exclusive_creation_and_rename_happen_once() {
    with_hosts(STALE, 1, |share| {
        let [a, b] = both(share, "file");
        assert!(!b.exists());
        File::create_new(&a).unwrap();
        assert_eq!(errno(File::create_new(&b)), libc::EEXIST);
        let [from, to] = both(share, "other");
        fs::rename(&a, &from).unwrap();
        assert_eq!(errno(fs::rename(&b, b.with_file_name("third"))), libc::ENOENT);
        assert!(to.exists());
    });
}

#[test]
fn locks_stay_on_their_host_unless_the_share_passes_them_on() {
    for shared_locks in [false, true] {
        with_hosts(Rules { shared_locks, ..STALE }, 1, |share| {
            let [a, b] = both(share, "").map(|dir| File::open(dir).unwrap());
            let lock = |dir| Flock::lock(dir, FlockArg::LockExclusiveNonblock).is_ok();
            assert!(lock(a) && lock(b));
            let paths = both(share, "lock");
            let open = |path: &PathBuf| {
                let mut options = OpenOptions::new();
                options.read(true).write(true).create(true).truncate(false).open(path).unwrap()
            };
            let [a, b] = paths.each_ref().map(open);
            let lock = |file: &File| {
                let l_type = libc::F_WRLCK as libc::c_short;
                let whole = libc::flock { l_type, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
                nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole)).is_ok()
            };
            assert!(lock(&a) && !lock(&open(&paths[0])));
            assert_eq!(lock(&b), !shared_locks);
            drop(a);
            assert!(lock(&b));
        });
    }
}

#[test]
fn removed_file_is_stale_for_other_hosts_and_hidden_for_its_own() {
    with_hosts(Rules::default(), 1, |share| {
        let [a, b] = both(share, "dir/file");
        fs::create_dir(a.parent().unwrap()).unwrap();
        fs::write(&a, "text").unwrap();
        let [mut own, mut other] = [&a, &b].map(|path| File::open(path).unwrap());
        fs::remove_file(&a).unwrap();
        let mut text = String::new();
        own.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        // Read and closed by the same host: the directory is free again.
        assert_eq!(errno(fs::remove_dir(a.parent().unwrap())), libc::ENOTEMPTY);
        drop(own);
        fs::remove_dir(a.parent().unwrap()).unwrap();
        assert_eq!(errno(other.read_to_string(&mut text)), libc::ESTALE);
    });
}

#[test]
fn lost_write_is_reported_by_the_sync_or_else_by_the_close() {
    with_hosts(Rules { lose_every: 1, ..Rules::default() }, 1, |share| {
        let [path, _] = both(share, "file");
        let mut file = File::create(&path).unwrap();
        file.write_all(b"text").unwrap();
        assert_eq!(errno(file.sync_all()), libc::EIO);
        file.sync_all().unwrap();
        file.write_all(b"text").unwrap();
        assert_eq!(nix::unistd::close(file), Err(nix::errno::Errno::EIO));
    });
}

#[test]
fn refused_flags_are_invalid() {
    with_hosts(Rules { direct: false, ..Rules::default() }, 1, |share| {
        let [path, _] = both(share, "file");
        fs::write(&path, "text").unwrap();
        let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
        assert_eq!(errno(direct), libc::EINVAL);
        let to = path.with_file_name("to");
        use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
        let renamed = renameat2(AT_FDCWD, &path, AT_FDCWD, &to, RenameFlags::RENAME_NOREPLACE);
        assert_eq!(renamed, Err(nix::errno::Errno::EINVAL));
    });
}
