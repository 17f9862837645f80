// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"fmt"

	"github.com/sluicehq/sluice/engine"
)

// FileError says which file, and which tensor of it, is at fault. It wraps engine.ErrCorrupt where
// the file is not what it claims to be, and what its ReaderAt said otherwise.
type FileError struct {
	File   string
	Tensor string // empty: none in particular
	Err    error
}

// Error names file, tensor and fault.
func (e *FileError) Error() string {
	if e.Tensor == "" {
		return fmt.Sprintf("%s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s: tensor %q: %v", e.File, e.Tensor, e.Err)
}

// Unwrap returns the fault.
func (e *FileError) Unwrap() error { return e.Err }

// faulty says what is wrong with a file; the name of a tensor is cut where it is too long to read.
func faulty(file, tensor, format string, args ...any) error {
	const most = 200
	if len(tensor) > most {
		tensor = tensor[:most] + "…"
	}
	return &FileError{File: file, Tensor: tensor, Err: fmt.Errorf(format+": %w",
		append(args, engine.ErrCorrupt)...)}
}
