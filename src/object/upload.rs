//! Uploads in parts. Nobody sees an object before its upload is finished; what is begun and never finished must be aborted.

use super::client::{Bucket, io_error};
use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::{PutMode, PutPayload};
use std::io;

impl Bucket {
    /// Uploads an object at once. One of that name is replaced.
    ///
    /// # Errors
    /// What the store says.
    pub fn upload(&self, name: &str, bytes: &Payload) -> io::Result<()> {
        self.put(name, bytes.0.clone(), PutMode::Overwrite)
    }

    /// Begins an upload of an object, and returns the store's number of it.
    ///
    /// # Errors
    /// What the store says.
    pub fn begin(&self, name: &str) -> io::Result<String> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move { store.parts().create_multipart(&key).await.map_err(io_error) })
    }

    /// Uploads part `number`, from 0, of an upload: name and number of the upload. Returns what the store says of the part.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the store knows no such upload; what it says otherwise.
    pub fn put_part(
        &self,
        (name, id): (&str, &str),
        number: usize,
        bytes: &Payload,
    ) -> io::Result<String> {
        let (store, key, id) = (self.store.clone(), self.key(name), id.to_owned());
        let payload = bytes.0.clone();
        self.run(async move {
            let part = store.parts().put_part(&key, &id, number, payload).await;
            part.map(|part| part.content_id).map_err(io_error)
        })
    }

    /// Makes the parts one object.
    ///
    /// # Errors
    /// As for [`Bucket::put_part`].
    pub fn finish(&self, (name, id): (&str, &str), parts: Vec<String>) -> io::Result<()> {
        let (store, key, id) = (self.store.clone(), self.key(name), id.to_owned());
        let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
        self.run(async move {
            store.parts().complete_multipart(&key, &id, parts).await.map(drop).map_err(io_error)
        })
    }

    /// Frees what the store keeps of an upload. One that it does not know is no error.
    ///
    /// # Errors
    /// What the store says.
    pub fn abort(&self, (name, id): (&str, &str)) -> io::Result<()> {
        let (store, key, id) = (self.store.clone(), self.key(name), id.to_owned());
        self.run(async move {
            match store.parts().abort_multipart(&key, &id).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(io_error(error)),
            }
        })
    }
}

/// Memory that is sent as it is, without a copy, as often as it takes. It is free once this is dropped and no request has it.
pub struct Payload(PutPayload);

impl Payload {
    /// The bytes of these, one after another.
    pub fn of<B: AsRef<[u8]> + Send + 'static>(bytes: Vec<B>) -> Self {
        Self(bytes.into_iter().map(Bytes::from_owner).collect())
    }
}
