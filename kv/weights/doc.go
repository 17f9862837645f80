// SPDX-License-Identifier: Apache-2.0

// Package weights loads the tensors of safetensors files into memory of the caller, which may have
// registered it with an engine or pinned it. It makes large sequential reads, several at a time,
// and reads ahead of the caller as far as the memory allows.
//
// Open reads and checks the headers of all files of a model. Load reads tensors in the order in
// which they will be needed, and uses the memory as a ring. It returns each tensor when all its
// bytes have arrived, as one contiguous slice that stays valid until Release. If the memory holds
// all tensors at once, the caller need not release any.
//
// Files are not trusted. The package checks a header before it uses it: for lengths and products
// that overflow, types, overlaps, gaps, and bytes beyond the end of the file. It accepts the same
// files as the safetensors library, except that it refuses tensors of more than 64
// dimensions, and entries in forms that no writer makes. Errors are a *FileError, which names file
// and tensor. Open also recognizes some other file formats and names them in the error.
package weights
