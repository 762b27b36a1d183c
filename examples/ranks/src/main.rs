//! One rank of the training, over Unix sockets. Start each of them:
//!
//! ```text
//! cargo build --release -p ringstow-ranks-example
//! for rank in 0 1; do target/release/ringstow-ranks-example run $rank 2 200 20 & done; wait
//! ```

use ringstow_ranks_example::sockets::Sockets;
use ringstow_ranks_example::train;
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [root, rank, ranks, steps, every] = args.as_slice() else {
        return Err("arguments: DIR RANK RANKS STEPS EVERY".into());
    };
    let root = Path::new(root);
    std::fs::create_dir_all(root)?;
    let mut sockets = Sockets::connect(&root.join("socket"), rank.parse()?, ranks.parse()?)?;
    train(root, (steps.parse()?, every.parse()?), &mut sockets)
}
