//! Opening any file takes at most four times its size and 1 MiB of memory, whatever the file says.

use crate::common::{scratch, sealed};
use fuzz_targets::memory::{CONSTANT, bounded, most_during};
use ringstow::internals::config::found;
use ringstow::{Checkpoint, OpenOptions, Receipt};
use std::fs;
use std::path::Path;

/// Bytes of a hostile file, about.
const BYTES: usize = 2 << 20;

fn repeated(piece: &str, between: &str) -> String {
    vec![piece; BYTES / (piece.len() + between.len())].join(between)
}

/// `piece` with each `#` replaced by a number, again and again.
fn numbered(piece: &str) -> String {
    let count = BYTES / (piece.len() + 8);
    (0..count).map(|n| piece.replace('#', &n.to_string())).collect::<Vec<_>>().join(",")
}

const FILE: &str = r#"{"name":"a.safetensors","bytes":1,"crc32":"00000000"}"#;

/// A manifest's text with these lists.
fn manifest(files: &str, tensors: &str, others: &str) -> Vec<u8> {
    let body = format!(
        r#"{{"format":"ringstow","version":1,"writer":"x","created_unix_ms":0,"generation":0,"world_size":1,"block_bytes":4096,"files":[{files}],"tensors":[{tensors}]{others}"#
    );
    sealed(body.as_bytes())
}

/// Everything that opens the directory of a file does it within the bound, and returns.
#[track_caller]
fn check(what: &str, file: &str, content: &[u8]) {
    let root = scratch();
    let dir = root.path().join("step-1");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a.safetensors"), "x").unwrap();
    fs::write(dir.join(file), content).unwrap();
    let parent = root.path();
    type Open = fn(&Path, &Path);
    let opens: [(&str, Open); 6] = [
        ("open", |dir, _| drop(Checkpoint::open(dir))),
        ("open_damaged", |dir, _| {
            drop(OpenOptions::new().damaged(true).open(dir).map(|opened| opened.info()))
        }),
        ("open_foreign", |dir, _| drop(OpenOptions::new().foreign(true).open(dir))),
        ("latest", |_, parent| drop(ringstow::latest(parent))),
        ("list", |_, parent| drop(ringstow::Store::found().unwrap().list(parent))),
        ("steps", |_, parent| {
            drop(ringstow::internals::store::steps(parent, None, &ringstow::Config::default()))
        }),
    ];
    for (name, open) in opens {
        println!("{what}: {name}");
        bounded(content.len(), CONSTANT, || open(&dir, parent));
    }
}

const STATE: &str = r#","state":{}"#;

#[test]
fn manifest_of_any_tensors_opens_in_bounded_memory() {
    let tensors = [
        (
            "many small tensors",
            numbered(r##"{"name":"#","dtype":"U8","shape":[1],"chunks":[{"file":0,"begin":0}]}"##),
        ),
        (
            "entries without content",
            repeated(r#"{"name":"","dtype":"U8","shape":[],"chunks":[]}"#, ","),
        ),
        ("entries as lists", repeated(r#"["","U8",[],[]]"#, ",")),
        (
            "eight dimensions",
            numbered(
                r##"{"name":"#","dtype":"U8","shape":[0,0,0,0,0,0,0,0],"chunks":[{"file":0,"begin":0}]}"##,
            ),
        ),
        (
            "ten dimensions",
            numbered(
                r##"{"name":"#","dtype":"U8","shape":[0,0,0,0,0,0,0,0,0,0],"chunks":[{"file":0,"begin":0}]}"##,
            ),
        ),
        (
            "huge numbers",
            repeated(
                r#"{"name":"","dtype":"F32","shape":[18446744073709551615],"chunks":[]}"#,
                ",",
            ),
        ),
    ];
    for (what, tensors) in tensors {
        check(what, "manifest.json", &manifest(FILE, &tensors, STATE));
    }
    let one = |shape: &str, chunks: &str| {
        manifest(
            FILE,
            &format!(r#"{{"name":"w","dtype":"U8","shape":[{shape}],"chunks":[{chunks}]}}"#),
            STATE,
        )
    };
    let chunks = [
        ("a shape of a million dimensions", one(&repeated("0", ","), "")),
        ("chunks without a region", one("0", &repeated(r#"{"file":0,"begin":0}"#, ","))),
        ("chunks as lists", one("0", &repeated("[0,0]", ","))),
        (
            "empty chunks",
            one("9", &repeated(r#"{"file":0,"begin":0,"offsets":[0],"sizes":[0]}"#, ",")),
        ),
        (
            "offsets of a million dimensions",
            one(
                "0",
                &format!(r#"{{"file":0,"begin":0,"offsets":[{}],"sizes":[]}}"#, repeated("0", ",")),
            ),
        ),
        (
            "chunks of nine dimensions",
            one(
                "9,9,9,9,9,9,9,9,9",
                &repeated(
                    r#"{"file":0,"begin":0,"offsets":[0,0,0,0,0,0,0,0,0],"sizes":[0,0,0,0,0,0,0,0,0]}"#,
                    ",",
                ),
            ),
        ),
    ];
    for (what, content) in chunks {
        check(what, "manifest.json", &content);
    }
}

#[test]
fn manifest_whose_chunks_are_split_along_many_dimensions_opens_in_bounded_memory() {
    let zeros = ["0"; 15].join(",");
    let ones = ["1"; 16].join(",");
    let count = 20_000;
    let chunk =
        |n: usize| format!(r#"{{"file":0,"begin":{n},"offsets":[{zeros},{n}],"sizes":[{ones}]}}"#);
    let chunks: Vec<String> = (0..count).map(chunk).collect();
    let file = format!(
        r#"{{"name":"a.safetensors","bytes":{count},"crc32":"{}"}}"#,
        "00000000".repeat(count.div_ceil(4096))
    );
    let shapes = [("whole", "1"), ("share", "2")];
    for (what, size) in shapes {
        let shape = vec![size; 15].join(",");
        let tensor = format!(
            r#"{{"name":"w","dtype":"U8","shape":[{shape},{count}],"chunks":[{}]}}"#,
            chunks.join(",")
        );
        let others = r#","part_of":{"rank":0,"ranks":2,"save":"s"},"state":{}"#;
        check(what, "manifest.json", &manifest(&file, &tensor, others));
    }
}

#[test]
fn manifest_of_any_files_and_values_opens_in_bounded_memory() {
    let tensor = "";
    let files = [
        ("many files", numbered(r##"{"name":"#.safetensors","bytes":0,"crc32":""}"##)),
        (
            "long files",
            numbered(
                r##"{"name":"#.safetensors","bytes":9000,"crc32":"000000000000000000000000"}"##,
            ),
        ),
        (
            "one file of many hashes",
            format!(
                r#"{{"name":"a.safetensors","bytes":1,"crc32":"00000000","hashes":"{}"}}"#,
                "0".repeat(BYTES / 48 * 48)
            ),
        ),
        (
            "files with a hash",
            numbered(&format!(
                r##"{{"name":"#.safetensors","bytes":1,"crc32":"00000000","hashes":"{}"}}"##,
                "0".repeat(48)
            )),
        ),
        ("files as lists", repeated(r#"["a.safetensors",0,""]"#, ",")),
        ("files without content", repeated(r#"{"name":"","bytes":0,"crc32":""}"#, ",")),
        (
            "one file of many chunks",
            format!(
                r#"{{"name":"a.safetensors","bytes":1,"crc32":"{}"}}"#,
                "00000000".repeat(BYTES / 8)
            ),
        ),
    ];
    for (what, files) in files {
        check(what, "manifest.json", &manifest(&files, tensor, STATE));
    }
    let nested = format!("{}{}", "[".repeat(BYTES / 2), "]".repeat(BYTES / 2));
    let others = [
        ("stripes", format!(r#","stripes":[{}],"state":{{}}"#, repeated(r#""""#, ","))),
        ("lists of lists", format!(r#","state":[{}]"#, repeated("[]", ","))),
        ("deep lists", format!(r#","state":{nested}"#)),
        ("escapes", format!(r#","state":"{}""#, repeated(r"\u0000", ""))),
        ("a long number", format!(r#","state":{}"#, "9".repeat(BYTES))),
        ("a long number for a field", format!(r#","state":0,"step":{}"#, "9".repeat(BYTES))),
        ("an unknown field", format!(r#","state":0,"new":[{}]"#, repeated("[]", ","))),
        (
            "a long name",
            format!(
                r#","state":0,"part_of":{{"rank":0,"ranks":1,"save":"{}"}}"#,
                "x".repeat(BYTES)
            ),
        ),
    ];
    for (what, others) in others {
        check(what, "manifest.json", &manifest(FILE, tensor, &others));
    }
    check("no JSON", "manifest.json", &sealed(repeated("x", "").as_bytes()));
    check("no trailer", "manifest.json", repeated("[]", ",").as_bytes());
}

/// A safetensors file whose header is this text.
fn shard(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
}

#[test]
fn safetensors_header_of_any_kind_opens_in_bounded_memory() {
    let headers = [
        (
            "many tensors",
            format!("{{{}}}", numbered(r##""#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"##)),
        ),
        ("tensors as lists", format!("{{{}}}", numbered(r##""#":["U8",[0],[0,0]]"##))),
        (
            "eight dimensions",
            format!(
                "{{{}}}",
                numbered(r##""#":{"dtype":"U8","shape":[0,0,0,0,0,0,0,0],"data_offsets":[0,0]}"##)
            ),
        ),
        (
            "nine dimensions",
            format!(
                "{{{}}}",
                numbered(
                    r##""#":{"dtype":"U8","shape":[0,0,0,0,0,0,0,0,0],"data_offsets":[0,0]}"##
                )
            ),
        ),
        (
            "a shape of a million dimensions",
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[0,0]}}}}"#,
                repeated("0", ",")
            ),
        ),
        ("many strings", format!(r#"{{"__metadata__":{{{}}}}}"#, numbered(r##""#":"""##))),
        (
            "many regions",
            format!(
                r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{{{}}}"}}}}"#,
                numbered(r##"\"#\":{\"saved_offsets\":[0]}"##)
            ),
        ),
        (
            "regions as lists",
            format!(
                r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{{{}}}"}}}}"#,
                numbered(r##"\"#\":[[0]]"##)
            ),
        ),
        (
            "long offsets",
            format!(
                r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{{\"a\":{{\"saved_offsets\":[{}]}}}}"}}}}"#,
                repeated("0", ",")
            ),
        ),
        (
            "huge numbers",
            format!(
                "{{{}}}",
                numbered(
                    r##""#":{"dtype":"U8","shape":[18446744073709551615,0],"data_offsets":[18446744073709551615,18446744073709551615]}"##
                )
            ),
        ),
        ("lists of lists", format!(r#"{{"a":[{}]}}"#, repeated("[]", ","))),
    ];
    for (what, header) in headers {
        check(what, "model.safetensors", &shard(&header));
    }
    check("regions of many dimensions", "model.safetensors", &shard(&sharded()));
}

/// Tensors with their regions, in a file of no data.
fn sharded() -> String {
    let tensors = numbered(r##""#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"##);
    let regions = numbered(r##"\"#\":{\"saved_offsets\":[1]}"##);
    format!(r#"{{"__metadata__":{{"DCP_SHARDING_INFO":"{{{regions}}}"}},{tensors}}}"#)
}

#[test]
fn index_of_any_kind_opens_in_bounded_memory() {
    let of = |map: String| format!(r#"{{"weight_map":{{{map}}}}}"#);
    let indexes = [
        ("many tensors", of(numbered(r##""#":"a.safetensors""##))),
        ("many files", of(numbered(r##""":"#.safetensors""##))),
        ("many tensors in many files", of(numbered(r##""#":"#.safetensors""##))),
        ("other names", of(numbered(r##""#":"""##))),
        ("escapes", of(numbered(r##""\n#":"\u0061.safetensors""##))),
        (
            "lists of lists",
            format!(r#"{{"weight_map":{{}},"metadata":[{}]}}"#, repeated("[]", ",")),
        ),
    ];
    for (what, index) in indexes {
        check(what, "model.safetensors.index.json", index.as_bytes());
    }
}

/// A receipt of these pieces, whose checksum matches: see `src/format/receipt/packed.rs`.
fn packed(tensors: &[u8], chunks: &[u8], files: &[u8]) -> Vec<u8> {
    let len = |bytes: &[u8]| -> [u8; 4] {
        [0, 7, 14, 21].map(|shift| (bytes.len() >> shift) as u8 & 0x7f | u8::from(shift < 21) << 7)
    };
    let head = b"rstow-rc\x01\0\0\0\0\0";
    let body = [&head[..], &len(tensors), tensors, &len(chunks), chunks, files].concat();
    let crc32 = crc32fast::hash(&body);
    [&body[..], &crc32.to_le_bytes()].concat()
}

#[test]
fn receipt_of_any_kind_is_read_in_bounded_memory() {
    let many = |piece: &[u8]| piece.repeat(BYTES / piece.len());
    let count = BYTES / 6;
    let (named, each) =
        ([&[0, 0, 128, 1][..], &[b'n'; 128], &[1, 0, 0]].concat(), [128, 0, 0, 1, 0, 0]);
    let files = [&[255, 255, 63][..], &many(&[0, 0, 0])].concat();
    let receipts = [
        ("tensors", packed(&many(&[0, 0, 0, 1, 0, 0]), &vec![0; count], &[0])),
        (
            "a long name again and again",
            packed(&[named, many(&each)].concat(), &vec![0; count + 1], &[0]),
        ),
        (
            "chunks",
            packed(&[0, 0, 0, 1, 0, 0], &[&[255, 255, 31][..], &many(&[0, 0, 0])].concat(), &[0]),
        ),
        ("a chunk for each tensor", packed(&many(&[0, 0, 0, 1, 0, 0]), &many(&[1, 0, 0, 0]), &[0])),
        (
            "dimensions",
            packed(&[&[0, 0, 0, 1, 0, 255, 255, 127][..], &many(&[0])].concat(), &[0], &[0]),
        ),
        ("files", packed(&[], &[], &files)),
        ("JSON", repeated("{}", ",").into_bytes()),
    ];
    for (what, receipt) in receipts {
        let (most, read) = most_during(|| Receipt::decode(&receipt).map(drop));
        assert!(
            most <= 64 * receipt.len() + CONSTANT,
            "{what}: {most} bytes for {}",
            receipt.len()
        );
        let error = read.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(!error.contains("damaged"), "{what}: {error}");
    }
}

#[test]
fn configuration_file_of_any_kind_is_read_in_bounded_memory() {
    let root = scratch();
    let path = root.path().join("ringstow.toml");
    let nested = "[".repeat(BYTES);
    let texts = [
        repeated("[[a]]\n", ""),
        repeated("a.b.c.d=1\n", ""),
        format!("stripe = [{}]", repeated("\"\"", ",")),
        format!("a = [{}]", repeated("[]", ",")),
        format!("a = {nested}"),
        (0..BYTES / 10).map(|n| format!("k{n} = 1\n")).collect(),
    ];
    for text in texts {
        // As long as such a file may be, and longer.
        for bytes in [1 << 10, 1 << 13, 1 << 14, 1 << 16, BYTES] {
            let text = &text[..bytes.min(text.len())];
            fs::write(&path, text).unwrap();
            bounded(text.len(), CONSTANT, || drop(found::read(&path, true)));
        }
    }
}

#[test]
fn other_files_of_any_length_are_read_in_bounded_memory() {
    for (file, content) in [
        (".metadata", repeated("x", "")),
        ("companion.json", format!(r#"{{"checkpoint":[{}]}}"#, repeated("[]", ","))),
        ("manifest.json.retired", repeated("[]", ",")),
        ("manifest.json.part", repeated("[]", ",")),
        ("rank00000.done.part", repeated("x", "")),
        ("ringstow.toml", repeated("x", "")),
    ] {
        check(file, file, content.as_bytes());
    }
}
