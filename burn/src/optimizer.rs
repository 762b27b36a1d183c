//! burn's record of an optimizer, taken apart into tensors and values. burn gives it away as one container of bytes alone, in which
//! parameters have ids that differ from process to process. Here they have their paths in the module.

use crate::source::below;
use burn_optim::{ModuleOptimizer, OptimizerRecord};
use burn_pack::{Reader, Scalar, Tensor, Writer};
use ringstow::{Error, Result, Value};
use std::collections::{BTreeMap, HashMap};

/// The value that has each parameter's path, and its numbers by field.
const PARAMETERS: &str = "parameters";

/// An optimizer's state: tensors named by parameter and field, and [`PARAMETERS`].
pub struct Parts {
    pub tensors: Vec<Tensor>,
    pub parameters: Value,
}

fn refused(error: impl std::fmt::Display) -> Error {
    Error::invalid(format!("the optimizer's state cannot be taken apart or put together: {error}"))
}

/// The name of the value that has the parameters.
pub fn parameters_of(part: &str) -> String {
    below(part, PARAMETERS)
}

/// Takes the state apart. Copies it: burn makes the record of copies.
///
/// # Errors
/// [`Error::Invalid`] if burn refuses, or does not say where in the module a parameter is.
pub fn parts(optimizer: &ModuleOptimizer) -> Result<Parts> {
    let bytes = optimizer.to_record().into_bytes().map_err(refused)?;
    let reader = Reader::from_bytes(bytes).map_err(refused)?;
    let paths = reader.metadata().clone();
    let place = |name: &str| {
        let (id, field) = name.split_once('.')?;
        Some((paths.get(id)?.clone(), field.to_owned()))
    };
    let place = |name: &str| {
        place(name).ok_or_else(|| refused(format!("{name:?} is of no parameter of a module")))
    };
    let mut parameters: BTreeMap<String, Vec<(Value, Value)>> =
        paths.values().map(|path| (path.clone(), Vec::new())).collect();
    for (name, scalar) in reader.scalars() {
        let (path, field) = place(name)?;
        parameters.entry(path).or_default().push((field.into(), value_of(*scalar)));
    }
    let mut tensors = reader.into_tensors().map_err(refused)?;
    for tensor in &mut tensors {
        let (path, field) = place(&tensor.name)?;
        (tensor.name, tensor.param_id) = (below(&path, &field), None);
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name)); // burn has them in no order
    let parameters =
        parameters.into_iter().map(|(path, numbers)| (path.into(), Value::Dict(numbers)));
    Ok(Parts { tensors, parameters: Value::Dict(parameters.collect()) })
}

/// Puts a state together, for a module whose parameters have these ids by their paths.
///
/// # Errors
/// [`Error::Invalid`] for parameters that the module does not have, for values that are not an optimizer's, and if burn refuses.
pub fn record(
    part: &str,
    tensors: Vec<Tensor>,
    values: &Value,
    ids: &HashMap<String, u64>,
) -> Result<OptimizerRecord> {
    let parameters = parameters(part, values)?;
    let id_of = |path: &str| {
        ids.get(path).copied().ok_or_else(|| {
            Error::invalid(format!("the module has no parameter {path:?}, of which {part:?} in the checkpoint has a state"))
        })
    };
    let named = |mut tensor: Tensor| {
        let is_owner = |at: &usize| parameters.contains_key(&tensor.name[..*at]);
        let at = dots(&tensor.name)
            .find(is_owner)
            .ok_or_else(|| not_an_optimizers(part, &tensor.name))?;
        let id = id_of(&tensor.name[..at])?;
        (tensor.name, tensor.param_id) = (format!("{id}{}", &tensor.name[at..]), Some(id));
        Ok(tensor)
    };
    let mut writer = Writer::new(tensors.into_iter().map(named).collect::<Result<_>>()?);
    for (path, numbers) in &parameters {
        let id = id_of(path)?;
        writer = writer.with_metadata(&id.to_string(), path);
        for (field, value) in numbers.iter() {
            let (Value::Str(field), Some(scalar)) = (field, scalar_of(value)) else {
                return Err(not_an_optimizers(part, path));
            };
            writer = writer.with_scalar(&format!("{id}.{field}"), scalar);
        }
    }
    OptimizerRecord::from_bytes(writer.into_bytes().map_err(refused)?).map_err(refused)
}

/// Places of the dots in a name, from the last to the first.
fn dots(name: &str) -> impl Iterator<Item = usize> {
    name.rmatch_indices('.').map(|(at, _)| at)
}

fn not_an_optimizers(part: &str, name: &str) -> Error {
    Error::invalid(format!("{:?} is not what an optimizer of burn's has", below(part, name)))
}

type Numbers = [(Value, Value)];

/// The numbers of each parameter.
fn parameters<'v>(part: &str, values: &'v Value) -> Result<BTreeMap<&'v str, &'v Numbers>> {
    let full = parameters_of(part);
    let Some(Value::Dict(items)) = values.get(&full) else {
        return Err(Error::invalid(format!(
            "the checkpoint has no {full:?}: no optimizer was saved as {part:?}"
        )));
    };
    let item = |(path, numbers): &'v (Value, Value)| match (path, numbers) {
        (Value::Str(path), Value::Dict(numbers)) => Ok((path.as_str(), numbers.as_slice())),
        _ => Err(not_an_optimizers(part, PARAMETERS)),
    };
    items.iter().map(item).collect()
}

/// A number with its type: 64 bits without a sign do not fit the format's integers, and 1.0 is not 1.
fn value_of(scalar: Scalar) -> Value {
    match scalar {
        Scalar::Int(number) => Value::Int(number),
        Scalar::UInt(number) => Value::Tuple(vec![number.to_string().into()]),
        Scalar::Float(number) => Value::Float(number),
        Scalar::Bool(value) => Value::Bool(value),
    }
}

fn scalar_of(value: &Value) -> Option<Scalar> {
    match value {
        Value::Int(number) => Some(Scalar::Int(*number)),
        Value::Tuple(items) => match items.as_slice() {
            [Value::Str(number)] => number.parse().ok().map(Scalar::UInt),
            _ => None,
        },
        Value::Float(number) => Some(Scalar::Float(*number)),
        Value::Bool(value) => Some(Scalar::Bool(*value)),
        _ => None,
    }
}
