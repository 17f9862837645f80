// SPDX-License-Identifier: Apache-2.0

// Package weights brings the tensors of safetensors files into memory of the caller, which may
// be registered with an engine or pinned: in large sequential reads, several at a time, ahead
// of their users, and within the memory that was lent.
//
// Open reads and checks the headers of all files of a model. Load reads tensors in the order in
// which they will be needed, into memory that is used as a ring: each tensor is handed out when its
// bytes are there, is whole and in one piece, and keeps its place until Release. Where all fits at
// once, nothing has to be released.
//
// Files come from elsewhere, so all that a header says is checked before anything is read by it:
// lengths and products that overflow, types, overlaps, holes, what lies beyond the end. What
// safetensors itself reads is read alike, and what it refuses is refused, but for tensors of more
// than 64 dimensions, and entries in forms that no writer makes. What is wrong is said in a
// *FileError with file and tensor, and a file of another kind is named.
package weights
