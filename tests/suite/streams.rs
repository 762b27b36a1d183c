//! Single files as streams: what is written is read, on every engine and with every fault; a file is published whole or
//! not at all, whatever call fails or kills; what a killed writer leaves is cleared.

#[cfg(debug_assertions)] // the seam exists in these builds only
mod each_call;
mod refused;

use crate::common::{ENGINES, State, engine, fault_seeds, names_in, noise, scratch, small_config};
use fake_engines::{Faults, Faulty};
use ringstow::internals::{engine::Engine, store};
use ringstow::{Config, Error, FileReader, FileWriter, Runtime, WriteOptions, WriteReport};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

const CHECKED: WriteOptions = WriteOptions { overwrite: true, checksums: true };

/// Empty, tiny, around a page and a block, many blocks.
const SIZES: [usize; 8] = [0, 1, 4095, 4096, 4097, 8192, 33_333, 100_000];

fn sound() -> Runtime {
    Runtime::new(small_config()).unwrap()
}

/// Writes in pieces of unequal sizes.
fn write_all(writer: &mut FileWriter, bytes: &[u8]) -> ringstow::Result<()> {
    let mut rest = bytes;
    for len in [1, 7, 4096, 300, 10_000].into_iter().cycle() {
        let (now, later) = rest.split_at(rest.len().min(len));
        writer.write_bytes(now)?;
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    Ok(())
}

fn write(
    runtime: &Runtime,
    path: &Path,
    bytes: &[u8],
    options: WriteOptions,
) -> ringstow::Result<WriteReport> {
    let mut writer = FileWriter::open(runtime, path, options)?;
    write_all(&mut writer, bytes)?;
    writer.finish()
}

fn read(runtime: &Runtime, path: &Path) -> ringstow::Result<Vec<u8>> {
    let mut reader = FileReader::open(runtime, path)?;
    let mut bytes = vec![0; reader.size() as usize];
    let done = reader.read_bytes(&mut bytes)?;
    assert_eq!(done, bytes.len());
    Ok(bytes)
}

fn faulty(name: &'static str, faults: Faults) -> Runtime {
    let build = move || {
        let faulty = Faulty::new(engine(name)?, faults.clone());
        Ok(Box::new(faulty) as Box<dyn Engine>)
    };
    Runtime::with_engine(small_config(), Arc::new(build)).unwrap()
}

#[test]
fn stream_is_read_as_it_was_written() {
    let (memory, disk) = (scratch(), tempfile::tempdir().unwrap());
    for root in [&memory, &disk] {
        let path = root.path().join("file");
        for (size, options) in SIZES.map(|size| (size, CHECKED)) {
            let bytes = noise(size as u64, size);
            let report = write(&sound(), &path, &bytes, options).unwrap();
            assert_eq!((report.bytes, report.crc32), (size as u64, crc32fast::hash(&bytes)));
            assert!(fs::read(&path).unwrap() == bytes, "{size} bytes");
            assert!(read(&sound(), &path).unwrap() == bytes);
            assert_eq!(FileReader::open(&sound(), &path).unwrap().unchecked(), None);
            assert_eq!(names_in(root.path()), ["file", "file.ringstow"]);
        }
    }
}

#[test]
fn short_and_reordered_transfers_change_no_byte_of_a_stream() {
    let root = scratch();
    let path = root.path().join("file");
    for seed in fault_seeds() {
        for name in ENGINES {
            let runtime = faulty(name, Faults::survivable(seed));
            let bytes = noise(seed, SIZES[seed as usize % SIZES.len()]);
            write(&runtime, &path, &bytes, CHECKED)
                .unwrap_or_else(|e| panic!("seed {seed}, {name}: {e}"));
            assert!(fs::read(&path).unwrap() == bytes, "seed {seed}, {name}");
            assert!(read(&runtime, &path).unwrap() == bytes, "seed {seed}, {name}");
        }
    }
}

#[test]
fn broken_engine_publishes_nothing() {
    let root = scratch();
    let path = root.path().join("file");
    fs::write(&path, "old").unwrap();
    for name in ENGINES {
        for after in [1, 7, 20] {
            let runtime = faulty(name, Faults { break_after: Some(after), ..Faults::default() });
            let error = write(&runtime, &path, &noise(1, 100_000), CHECKED).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{error:?}");
            assert_eq!(fs::read(&path).unwrap(), b"old");
            assert_eq!(names_in(root.path()), ["file"]);
        }
    }
}

#[test]
fn dropped_and_aborted_streams_leave_the_old_file_and_nothing_else() {
    let root = scratch();
    let path = root.path().join("file");
    fs::write(&path, "old").unwrap();
    for aborts in [false, true] {
        let mut writer = FileWriter::open(&sound(), &path, CHECKED).unwrap();
        write_all(&mut writer, &noise(1, 50_000)).unwrap();
        assert_eq!(writer.position(), 50_000);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        if aborts {
            writer.abort();
            assert!(writer.write_bytes(b"more").is_err());
            assert!(writer.finish().is_err());
        }
    }
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names_in(root.path()), ["file"]);
}

#[test]
fn permissions_of_the_replaced_file_and_a_link_to_it_stay() {
    let root = scratch();
    let (path, link) = (root.path().join("file"), root.path().join("link"));
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    symlink("file", &link).unwrap();
    write(&sound(), &link, b"new", WriteOptions::default()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
}

#[test]
fn uncommitted_file_is_as_private_as_the_one_that_it_will_replace() {
    let root = scratch();
    let path = root.path().join("file");
    fs::write(&path, "secret").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let _writer = FileWriter::open(&sound(), &path, WriteOptions::default()).unwrap();
    for name in names_in(root.path()) {
        let mode = fs::metadata(root.path().join(&name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn reader_seeks_anywhere() {
    let root = scratch();
    let path = root.path().join("file");
    let bytes = noise(3, 100_000);
    write(&sound(), &path, &bytes, CHECKED).unwrap();
    let mut reader = FileReader::open(&sound(), &path).unwrap();
    let mut random = fastrand::Rng::with_seed(5);
    for _ in 0..300 {
        let at = random.usize(..bytes.len() + 10);
        let mut some = vec![0; random.usize(..20_000)];
        let to = match random.u8(..3) {
            0 => SeekFrom::Start(at as u64),
            1 => SeekFrom::End(at as i64 - bytes.len() as i64),
            _ => SeekFrom::Current(at as i64 - reader.position() as i64),
        };
        assert_eq!(reader.seek(to).unwrap(), at as u64);
        let read = reader.read_bytes(&mut some).unwrap();
        let from = at.min(bytes.len());
        assert!(some[..read] == bytes[from..from + read], "at {at}");
        assert_eq!(read, some.len().min(bytes.len() - from));
    }
    assert!(reader.seek(SeekFrom::Start(0)).is_ok() && reader.seek(SeekFrom::Current(-1)).is_err());
    let mut all = Vec::new();
    reader.read_to_end(&mut all).unwrap();
    assert!(all == bytes);
}

#[test]
fn flipped_byte_is_found_before_its_chunk_is_handed_out() {
    let root = scratch();
    let path = root.path().join("file");
    let bytes = noise(4, 50_000);
    write(&sound(), &path, &bytes, CHECKED).unwrap();
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let mut damaged = bytes.clone();
    damaged[20_000] ^= 4;
    fs::write(&path, &damaged).unwrap();
    // As on a disk that flips bits.
    fs::File::options().append(true).open(&path).unwrap().set_modified(modified).unwrap();
    let mut reader = FileReader::open(&sound(), &path).unwrap();
    let mut before = vec![0; 16_384];
    reader.read_exact(&mut before).unwrap();
    assert!(before == bytes[..16_384]);
    for _ in 0..2 {
        let error = reader.read_bytes(&mut [0; 1]).unwrap_err();
        assert!(matches!(error, Error::Corrupt { offset: 16_384, .. }), "{error}");
    }
    reader.seek(SeekFrom::Start(20_480)).unwrap();
    let mut after = Vec::new();
    reader.read_to_end(&mut after).unwrap();
    assert!(after == bytes[20_480..], "what is intact is read");
}

#[test]
fn checksums_of_another_content_are_not_used() {
    let root = scratch();
    let path = root.path().join("file");
    write(&sound(), &path, b"first", CHECKED).unwrap();
    fs::write(&path, "other").unwrap();
    let reader = FileReader::open(&sound(), &path).unwrap();
    assert!(reader.unchecked().unwrap().contains("another content"), "{:?}", reader.unchecked());
    assert_eq!(read(&sound(), &path).unwrap(), b"other");
    write(&sound(), &path, b"third", WriteOptions::default()).unwrap();
    assert_eq!(names_in(root.path()), ["file"], "stale checksums are removed");
    let reader = FileReader::open(&sound(), &path).unwrap();
    assert!(reader.unchecked().unwrap().contains("does not exist"));
}

#[test]
fn open_streams_keep_no_save_waiting() {
    let root = scratch();
    let runtime =
        Runtime::new(Config { block_bytes: 4096, pool_bytes: 2 * 4096, ..Config::default() });
    let runtime = runtime.unwrap();
    let paths: Vec<_> = (0..5).map(|n| root.path().join(format!("file{n}"))).collect();
    let mut writers: Vec<_> =
        paths.iter().map(|path| FileWriter::open(&runtime, path, CHECKED).unwrap()).collect();
    let bytes = noise(6, 50_000);
    for writer in &mut writers {
        write_all(writer, &bytes).unwrap();
    }
    let state = State::new(1, &crate::common::SIZES);
    state.save(&runtime, &root.path().join("checkpoint")).unwrap();
    writers.into_iter().for_each(|writer| drop(writer.finish().unwrap()));
    let mut readers: Vec<_> =
        paths.iter().map(|path| FileReader::open(&runtime, path).unwrap()).collect();
    for reader in &mut readers {
        reader.read_exact(&mut [0; 20_000]).unwrap();
    }
    state.save(&runtime, &root.path().join("checkpoint")).unwrap();
    assert!(paths.iter().all(|path| fs::read(path).unwrap() == bytes));
}

#[test]
fn prune_removes_what_killed_streams_left_and_no_directory() {
    let root = scratch();
    let dir = root.path().join("models");
    fs::create_dir(&dir).unwrap();
    let dead = "file.0123456789abcdef.stream-part";
    fs::write(root.path().join(dead), "x").unwrap();
    fs::write(dir.join(dead), "x").unwrap();
    let writer = FileWriter::open(&sound(), &dir.join("other"), CHECKED).unwrap();
    let config = small_config();
    let planned = store::prune_plan(root.path(), &config).unwrap();
    assert_eq!(planned.removed, [root.path().join(dead), dir.join(dead)]);
    let swept = store::prune(root.path(), &config).unwrap();
    assert_eq!(swept.removed, planned.removed);
    assert_eq!(swept.left.len(), 1, "the open one: {swept:?}");
    drop(writer);
    assert_eq!(names_in(root.path()), ["models"]);
    assert_eq!(names_in(&dir), [""; 0]);
}

#[test]
fn std_traits_copy_a_stream() {
    let root = scratch();
    let (from, to) = (root.path().join("from"), root.path().join("to"));
    let bytes = noise(7, 70_000);
    fs::write(&from, &bytes).unwrap();
    let mut reader = FileReader::open(&sound(), &from).unwrap();
    let mut writer = FileWriter::open(&sound(), &to, WriteOptions::default()).unwrap();
    assert_eq!(std::io::copy(&mut reader, &mut writer).unwrap(), 70_000);
    writer.flush().unwrap();
    writer.finish().unwrap();
    assert!(fs::read(&to).unwrap() == bytes);
}
