//! `ringstow convert`: only names the Python package, which has this command, since only torch reads and
//! writes torch's formats.

use super::Exit;
use crate::error::{Error, Result};
use clap::Args;

/// Convert a checkpoint to or from torch.save, DCP or Hugging Face safetensors (Python package)
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Convert {
    /// Arguments of the Python package: SRC DST and options
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub fn run(convert: &Convert) -> Result<Exit> {
    Err(Error::Unsupported {
        what: format!(
            "convert {} needs PyTorch to read and write its formats",
            convert.args.join(" ")
        ),
        remedy:
            "install the Python package (pip install ringstow), whose `ringstow` program converts"
                .into(),
    })
}
