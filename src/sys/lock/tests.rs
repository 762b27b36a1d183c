//! A directory has one lock, also if another process removes or replaces it, or another host shares it.

use crate::sys::lock::*;
use std::fs;

#[test]
fn directory_that_was_removed_and_recreated_has_one_lock() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("step");
    fs::create_dir(&dir).unwrap();
    // Opened, and removed by somebody else before it is locked.
    let opened = Dir::open(&dir).unwrap();
    fs::remove_dir(&dir).unwrap();
    let error = DirLock::of(opened.clone(), (Who::One, true)).unwrap_err();
    assert!(error.is_not_found(), "{error}");
    fs::create_dir(&dir).unwrap();
    let held = DirLock::take(&dir).unwrap();
    assert_eq!((held.reach(), held.is_shared()), (Reach::EveryHost, false));
    assert!(DirLock::of(opened, (Who::One, true)).unwrap().is_none());
    assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
    drop(held);
    assert!(lock_file(&dir).is_none());
}

fn lock_file(dir: &Path) -> Option<Metadata> {
    dir.join(FILE).metadata().ok()
}

/// Other hosts do not see this one's locks on directories.
#[cfg(target_os = "linux")]
mod other_hosts {
    use super::*;
    use crate::sys::file_system::play;
    use crate::sys::seam::{Outcome, Watch, fail_call, fail_if, on_thread};
    use nix::libc::{EACCES, EMFILE, ENOLCK, ESTALE};

    fn no_flock(dir: &Path) -> Watch {
        fail_call(Call::Lock, dir, ENOLCK)
    }

    #[test]
    fn lock_file_keeps_out_hosts_that_do_not_see_the_lock_on_the_directory() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let _nfs = play(&dir, "nfs4", "local_lock=none");
        let _hosts = no_flock(&dir);
        let held = DirLock::take(&dir).unwrap();
        assert_eq!((held.reach(), held.is_shared()), (Reach::EveryHost, true));
        assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
        drop(held);
        assert!(DirLock::take(&dir).is_ok());
        assert_eq!(lock_file(&dir).unwrap().len(), 0);
    }

    #[test]
    fn server_of_a_directory_locks_the_file_that_its_clients_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let client = {
            let _nfs = play(&dir, "nfs4", "");
            let _hosts = no_flock(&dir);
            DirLock::take(&dir).unwrap()
        };
        // The server itself sees a local disk, and not the client's lock on the directory.
        assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
        drop(client);
        let server = DirLock::take(&dir).unwrap();
        assert_eq!((server.reach(), server.is_shared()), (Reach::EveryHost, false));
        // A directory that was copied from there goes with its lock file.
        assert!(server.remove_dir().unwrap() && !dir.exists());
    }

    #[test]
    fn host_without_reach_is_kept_out_by_hosts_that_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let _hosts = no_flock(&dir);
        let fuse = play(&dir, "fuse.ceph", "");
        let held = DirLock::take(&dir).unwrap();
        assert_eq!(held.reach(), Reach::ThisHost);
        drop(fuse);
        let _kernel = play(&dir, "ceph", "");
        assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
    }

    #[test]
    fn look_and_withdrawn_lock_leave_no_file() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let _nfs = play(&dir, "nfs4", "");
        drop(DirLock::take_to_look(&Dir::open(&dir).unwrap()).unwrap());
        assert!(lock_file(&dir).is_none());
        DirLock::take(&dir).unwrap().withdraw();
        assert!(lock_file(&dir).is_none());
        drop(DirLock::take(&dir).unwrap());
        assert!(matches!(
            (DirLock::take(&dir), DirLock::take_to_look(&Dir::open(&dir).unwrap())),
            (Ok(_), Err(Error::Busy { .. }))
        ));
        DirLock::take(&dir).unwrap().withdraw();
        assert!(lock_file(&dir).is_some(), "an earlier save created it");
    }

    #[test]
    fn who_may_write_to_the_directory_may_lock_its_file() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let _nfs = play(&dir, "nfs4", "");
        for (mode, expected) in [(0o1777, 0o666), (0o775, 0o664), (0o700, 0o600)] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            drop(DirLock::take(&dir).unwrap());
            assert_eq!(lock_file(&dir).unwrap().permissions().mode() & 0o777, expected);
            fs::remove_file(dir.join(FILE)).unwrap();
        }
    }

    #[test]
    fn lock_file_goes_with_its_directory() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap().join("step");
        fs::create_dir(&dir).unwrap();
        let _nfs = play(&dir, "nfs4", "");
        let held = DirLock::take(&dir).unwrap();
        fs::write(dir.join("notes.txt"), "").unwrap();
        assert!(!held.remove_dir().unwrap() && lock_file(&dir).is_some());
        assert!(!remove_if_empty(&Dir::open(&dir).unwrap()).unwrap());
        fs::remove_file(dir.join("notes.txt")).unwrap();
        assert!(remove_if_empty(&Dir::open(&dir).unwrap()).unwrap() && !dir.exists());
    }

    #[test]
    fn lock_file_that_was_removed_and_recreated_has_one_lock() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let path = dir.join(FILE);
        let _nfs = play(&dir, "nfs4", "");
        let _hosts = no_flock(&dir);
        // Another host replaces the file after it was opened and before it is locked.
        let mut replace = Some(path.clone());
        let watch = on_thread(move |_, call, on| {
            if call == Call::Lock && replace.as_deref() == Some(on) {
                let path = replace.take().unwrap();
                fs::remove_file(&path).unwrap();
                fs::write(&path, "").unwrap();
            }
            Outcome::Pass
        });
        let held = DirLock::take(&dir).unwrap();
        assert_eq!(watch.take_paths(Call::Lock), [path.clone(), path]);
        let now = lock_file(&dir).unwrap();
        let file = &held.file.as_ref().unwrap().file;
        assert_eq!(identity(now), identity(file.metadata().unwrap()));
    }

    #[test]
    fn locks_that_fail_or_stay_on_this_host_have_no_reach() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let without = no_flock(&dir);
        let lock = DirLock::take(&dir).unwrap();
        assert_eq!((lock.reach(), lock.is_shared()), (Reach::ThisHost, true));
        assert!(lock.why().contains("the lock failed"), "{}", lock.why());
        drop((lock, without));
        let nolock = play(&dir, "nfs4", "nolock");
        let lock = DirLock::take(&dir).unwrap();
        assert_eq!(lock.reach(), Reach::ThisHost);
        assert!(lock.why().contains("`nolock`"), "{}", lock.why());
        // This host's processes still keep each other out.
        assert!(matches!(DirLock::take(&dir), Err(Error::Busy { .. })));
        drop((lock, nolock));
        let _nfs = play(&dir, "nfs4", "");
        let _failing = fail_call(Call::Lock, &dir.join(FILE), ENOLCK);
        let lock = DirLock::take(&dir).unwrap();
        assert_eq!(lock.reach(), Reach::ThisHost);
        assert!(lock.why().contains("the lock failed on nfs4"), "{}", lock.why());
    }

    #[test]
    fn local_directory_whose_lock_file_cannot_be_locked_is_shared() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        // A client of this server has made it, as another user.
        fs::write(dir.join(FILE), "").unwrap();
        let _failing = fail_call(Call::Open, &dir.join(FILE), EACCES);
        let lock = DirLock::take(&dir).unwrap();
        assert_eq!((lock.reach(), lock.is_shared()), (Reach::ThisHost, true));
    }

    #[test]
    fn lock_file_goes_only_if_nobody_can_lock_it() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let path = dir.join(FILE);
        let _nfs = play(&dir, "nfs4", "");
        // Another host may have locked the new file before this host's lock failed.
        let failing = fail_call(Call::Lock, &path, 5);
        let error = DirLock::take(&dir).unwrap_err();
        assert!(error.to_string().contains("locking"), "{error}");
        assert!(lock_file(&dir).is_some());
        drop(failing);
        fs::remove_file(&path).unwrap();
        let _failing = fail_call(Call::Lock, &path, ENOLCK);
        drop(DirLock::take(&dir).unwrap());
        assert!(lock_file(&dir).is_none());
        // One that cannot be removed either is no worse.
        let _stays = fail_call(Call::Remove, &path, 5);
        assert_eq!(DirLock::take(&dir).unwrap().reach(), Reach::ThisHost);
    }

    #[test]
    fn lock_that_fails_where_other_hosts_rely_on_it_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let _nfs = play(&dir, "nfs4", "");
        let failing = fail_call(Call::Create, &dir.join(FILE), EMFILE);
        let error = DirLock::take(&dir).unwrap_err();
        assert!(error.to_string().contains(FILE), "{error}");
        drop(failing);
        assert_eq!(DirLock::take(&dir).unwrap().reach(), Reach::EveryHost);
    }

    #[test]
    fn lock_file_that_another_host_has_just_removed_is_made_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().canonicalize().unwrap();
        let path = dir.join(FILE);
        let _nfs = play(&dir, "nfs4", "");
        let mut stale = Some(path);
        let _watch = on_thread(fail_if(ESTALE, move |call, on| {
            call == Call::Lock && stale.take_if(|path| path == on).is_some()
        }));
        assert_eq!(DirLock::take(&dir).unwrap().reach(), Reach::EveryHost);
    }
}
