//! `ringstow convert`: torch's formats are torch's to read and write, so that this command is the Python
//! package's. Here it only says so.

use super::Exit;
use crate::error::{Error, Result};
use clap::Args;

/// Convert a checkpoint to or from torch.save, DCP or Hugging Face safetensors (Python package)
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Convert {
    /// What the Python package takes: SRC DST and options
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub fn run(convert: &Convert) -> Result<Exit> {
    Err(Error::Unsupported {
        what: format!(
            "convert {} needs PyTorch to read and write its formats",
            convert.args.join(" ")
        ),
        remedy: "install the Python package (pip install ringstow), whose `ringstow` does it"
            .into(),
    })
}
