//! Saves and loads that are awaited: under tokio's runtimes and, where it is built, tokio-uring's.
//!
//! A case that blocked its executor would not end, since what it waits for is another task's to do.

use crate::common::held::{self, Filled, Held, made};
use crate::common::{noise, scratch, small_config, step_at, store};
use ringstow::{
    Checkpoint, Config, Error, LoadOptions, Runtime, SaveHandle, Source, StateDict, Store,
    load_async,
};
use std::future::{Future, poll_fn};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::Poll;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

fn save_async(state: StateDict<'static>, path: impl AsRef<Path>) -> SaveHandle {
    store().save_async(state, path).unwrap()
}

/// Runs each case under each executor.
macro_rules! under_each_executor {
    ($($case:ident),* $(,)?) => {
        mod current_thread {
            $(#[test]
            fn $case() {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(crate::awaiting::$case());
            })*
        }
        mod multi_thread {
            $(#[test]
            fn $case() {
                let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
                runtime.block_on(crate::awaiting::$case());
            })*
        }
        #[cfg(all(target_os = "linux", feature = "tokio-uring"))]
        mod within_tokio_uring {
            $(#[test]
            fn $case() {
                tokio_uring::start(crate::awaiting::$case());
            })*
        }
    };
}

under_each_executor! {
    what_was_saved_is_loaded,
    some_tensors_are_loaded_by_name_and_into_memory_that_is_there,
    two_saves_at_once_are_both_awaited,
    other_tasks_run_on_while_a_save_is_held_up,
    staging_is_awaited_by_another_task,
    a_save_that_fails_is_never_staged_and_gives_its_error,
    a_cancelled_save_says_so,
    a_save_goes_on_when_its_future_is_dropped,
    a_save_goes_on_when_its_handle_is_dropped_before_it_was_awaited,
    a_load_that_fails_gives_its_error,
}

/// Bytes of a tensor: many blocks.
const BYTES: usize = 100_000;

fn state(source: impl Source + 'static) -> StateDict<'static> {
    let mut state = held::only(source);
    state.value("step", 7);
    state
}

/// A save that is held up, the sign that it has begun, and the word that lets it go on when dropped.
fn held_save(path: &Path) -> (SaveHandle, UnboundedReceiver<()>, Sender<()>) {
    let (asked, begun) = unbounded_channel();
    let filled = Filled { byte: 7, bytes: BYTES };
    let (held, go_on) = Held::new(filled, move || {
        let _ = asked.send(());
    });
    (save_async(state(held), path), begun, go_on)
}

/// Polls a future once, and finds it pending.
async fn assert_pending<F: Future + Unpin>(future: &mut F) {
    let polled = poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_pending()));
    assert!(polled.await);
}

async fn what_was_saved_is_loaded() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let data = noise(1, BYTES);
    let saving = save_async(state(data.clone()), &path);
    assert_eq!(saving.await.unwrap().tensor_bytes, BYTES as u64);
    let loaded = load_async(&path).unwrap().await.unwrap();
    assert!(loaded.tensor("t").unwrap().data() == data);
}

async fn some_tensors_are_loaded_by_name_and_into_memory_that_is_there() {
    let root = scratch();
    let (a, b) = (noise(1, BYTES), noise(2, 5000));
    let mut state = state(a.clone());
    held::add(&mut state, "b", b.clone());
    save_async(state, root.path().join("ckpt")).await.unwrap();

    let checkpoint = Arc::new(Checkpoint::open(root.path().join("ckpt")).unwrap());
    let _runtime = Runtime::shared(&small_config()).unwrap();
    let options = LoadOptions::default();
    let named = checkpoint.load_names_async(["b"], options.verify).unwrap();
    let into = vec![("t".to_owned(), vec![0; BYTES])];
    let filling = checkpoint.load_into_async(into, options.verify).unwrap();
    let job = filling.job().clone();
    let (filled, report) = filling.await.unwrap();
    assert!(filled[0].1 == a);
    assert_eq!(job.progress().total, report.read_bytes);
    let named = named.await.unwrap();
    assert!(named.tensor("b").unwrap().data() == b && named.tensor("t").is_none());
}

async fn two_saves_at_once_are_both_awaited() {
    let root = scratch();
    let (first, mut begun, go_on) = held_save(&root.path().join("first"));
    begun.recv().await.unwrap();
    // The first can end only after the second has.
    let first = tokio::spawn(first);
    save_async(state(noise(2, BYTES)), root.path().join("second")).await.unwrap();
    drop(go_on);
    first.await.unwrap().unwrap();
    assert_eq!((step_at(&root.path().join("first")), step_at(&root.path().join("second"))), (7, 7));
}

async fn other_tasks_run_on_while_a_save_is_held_up() {
    let root = scratch();
    let (saving, mut begun, go_on) = held_save(&root.path().join("ckpt"));
    let other = tokio::spawn(async move {
        begun.recv().await.unwrap();
        drop(go_on);
    });
    saving.await.unwrap();
    other.await.unwrap();
}

async fn staging_is_awaited_by_another_task() {
    let root = scratch();
    let (saving, mut begun, go_on) = held_save(&root.path().join("ckpt"));
    let mut staged = saving.until_staged();
    begun.recv().await.unwrap();
    assert_pending(&mut staged).await;
    assert!(!saving.staged());
    let other = tokio::spawn(staged);
    drop(go_on);
    assert!(other.await.unwrap());
    assert!(saving.until_staged().await && saving.staged());
    saving.await.unwrap();
}

async fn a_save_that_fails_is_never_staged_and_gives_its_error() {
    let root = scratch();
    let panics = made(10, |_, _| panic!("no such tensor"));
    let saving = save_async(state(panics), root.path().join("ckpt"));
    assert!(!saving.until_staged().await);
    let error = saving.await.unwrap_err();
    assert!(matches!(error, Error::Panicked { .. }), "{error:?}");
    assert!(error.to_string().contains("panicked"), "{error}");
    let bad = Config { queue_depth: 0, ..Config::default() };
    assert!(matches!(Store::new(bad), Err(Error::Invalid { .. })));
}

async fn a_cancelled_save_says_so() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let (saving, mut begun, go_on) = held_save(&path);
    begun.recv().await.unwrap();
    saving.cancel();
    drop(go_on);
    assert!(matches!(saving.await, Err(Error::Cancelled { .. })));
    assert!(!path.exists());
}

async fn a_save_goes_on_when_its_future_is_dropped() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let (mut saving, mut begun, go_on) = held_save(&path);
    begun.recv().await.unwrap();
    assert_pending(&mut saving).await;
    assert_goes_on(saving, go_on, &path);
}

/// Drops a save's handle, then gives the word. Were the drop to wait for the save, the word would never be given.
fn assert_goes_on(saving: SaveHandle, go_on: Sender<()>, path: &Path) {
    let job = saving.job().clone();
    drop(saving);
    assert!(!job.ended());
    drop(go_on);
    job.wait_ended(None);
    assert_eq!(step_at(path), 7);
}

async fn a_save_goes_on_when_its_handle_is_dropped_before_it_was_awaited() {
    let root = scratch();
    let path = root.path().join("ckpt");
    let (saving, mut begun, go_on) = held_save(&path);
    begun.recv().await.unwrap();
    assert_goes_on(saving, go_on, &path);
}

async fn a_load_that_fails_gives_its_error() {
    let root = scratch();
    let missing = load_async(root.path().join("missing")).unwrap();
    assert!(matches!(missing.await, Err(Error::Io { .. })));
    let nothing = load_async(root.path()).unwrap();
    assert!(matches!(nothing.await, Err(Error::NoCheckpoint { .. })));
}

/// The path that a child saves to, and leaves.
const LEFT: &str = "RINGSTOW_TEST_LEFT_SAVE";

#[test]
fn a_process_ends_only_after_the_saves_whose_handles_it_dropped() {
    if let Some(path) = std::env::var_os(LEFT) {
        let (saving, mut begun, go_on) = held_save(path.as_ref());
        begun.blocking_recv().unwrap();
        drop(saving);
        std::thread::spawn(move || {
            // Ends once the parent knows that `main` has nothing else to do.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            drop(go_on);
        });
        return;
    }
    let root = scratch();
    let path = root.path().join("ckpt");
    let name = "awaiting::a_process_ends_only_after_the_saves_whose_handles_it_dropped";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(LEFT, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("1 passed")));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(step_at(&path), 7);
}

#[test]
fn dropped_handle_cancels_its_load() {
    let root = scratch();
    let path = root.path().join("ckpt");
    save_async(state(noise(1, BYTES)), &path).result().unwrap();
    let loading = load_async(&path).unwrap();
    let job = loading.job().clone();
    drop(loading);
    assert!(job.wait_ended(None));
}

#[test]
fn result_that_was_taken_already_is_an_error_and_no_panic() {
    let root = scratch();
    let mut state = StateDict::new();
    state.value("step", 1);
    let handle = save_async(state, root.path().join("ckpt"));
    handle.wait(None);
    assert!(handle.take().unwrap().is_ok());
    let error = handle.result().unwrap_err();
    assert!(error.to_string().contains("`take`"), "{error}");
}
