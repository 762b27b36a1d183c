//! A file system on a disk whose power can be cut, for tests in other languages.
//!
//! `cut-disk ext4|xfs|btrfs SEED` prints where the file system is mounted. Each line that it then reads is a word: `cut`
//! or `restore`. It answers each with `done`, and unmounts at the end of its input. An error is a line that starts with
//! `error:`. Start it in a mount namespace of its own (`unshare --mount`), so that nothing outlives a killed test.

#[cfg(target_os = "linux")]
fn main() {
    if let Err(why) = serve() {
        println!("error: {why}");
        std::process::exit(1);
    }
}

#[cfg(target_os = "linux")]
fn serve() -> Result<(), String> {
    use cut_disk::{FileSystem, Powered};
    let mut arguments = std::env::args().skip(1);
    let of =
        arguments.next().as_deref().and_then(FileSystem::named).ok_or("ext4, xfs or btrfs?")?;
    let seed = arguments.next().and_then(|seed| seed.parse().ok()).ok_or("which seed?")?;
    let mut powered = Powered::new(of, 1, seed)?;
    println!("{}", powered.path(0).display());
    for line in std::io::stdin().lines() {
        match line.map_err(|e| e.to_string())?.as_str() {
            "cut" => powered.cut(),
            "restore" => powered.restore()?,
            other => return Err(format!("cut or restore, not {other:?}")),
        }
        println!("done");
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("error: this needs Linux");
}
