//! What cannot be written or read as a stream, and what the errors say.

use crate::common::{errno, names_in, scratch};
use crate::streams::{CHECKED, read, sound, write};
use nix::libc::{EEXIST, EISDIR, ENOENT};
use ringstow::{Config, Error, FileWriter, WriteOptions};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

#[test]
fn what_is_no_file_is_refused_before_anything_is_created() {
    let root = scratch();
    let path = |name: &str| root.path().join(name);
    fs::create_dir(path("dir")).unwrap();
    symlink("nowhere", path("broken")).unwrap();
    nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let before = names_in(root.path());
    let open = |path: &Path| FileWriter::open(&sound(), path, CHECKED).unwrap_err();
    assert_eq!(errno(&open(&path("dir"))), Some(EISDIR));
    assert_eq!(errno(&open(&path("missing/file"))), Some(ENOENT));
    for (name, says) in [("broken", "leads nowhere"), ("fifo", "FIFO"), ("new/", "directory")] {
        let error = open(&path(name));
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
        assert!(
            error.to_string().contains(says)
                && error.to_string().contains(name.trim_end_matches('/'))
        );
    }
    assert!(open(Path::new("s3://bucket/file")).to_string().contains("URL"));
    assert_eq!(names_in(root.path()), before);
    assert_eq!(errno(&read(&sound(), &path("nothing")).unwrap_err()), Some(ENOENT));
    assert_eq!(errno(&read(&sound(), &path("dir")).unwrap_err()), Some(EISDIR));
}

#[test]
fn file_that_must_not_be_replaced_is_refused_when_opened_and_when_published() {
    let root = scratch();
    let path = root.path().join("file");
    let new_only = WriteOptions { overwrite: false, checksums: true };
    let mut writer = FileWriter::open(&sound(), &path, new_only).unwrap();
    writer.write_bytes(b"mine").unwrap();
    fs::write(&path, "theirs").unwrap();
    let error = writer.finish().unwrap_err();
    assert_eq!(errno(&error), Some(EEXIST), "{error}");
    assert_eq!(errno(&FileWriter::open(&sound(), &path, new_only).unwrap_err()), Some(EEXIST));
    assert_eq!(fs::read(&path).unwrap(), b"theirs");
    assert_eq!(names_in(root.path()), ["file"]);
    fs::remove_file(&path).unwrap();
    write(&sound(), &path, b"mine", new_only).unwrap();
    assert_eq!(read(&sound(), &path).unwrap(), b"mine");
}

#[test]
fn paced_stream_is_written_whole() {
    let root = scratch();
    let path = root.path().join("file");
    let config = Config { write_rate: 1 << 40, ..crate::streams::small_config() };
    let runtime = ringstow::Runtime::new(config).unwrap();
    write(&runtime, &path, &[7; 20_000], CHECKED).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [7; 20_000]);
}
