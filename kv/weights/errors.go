// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"fmt"

	"github.com/sluicehq/sluice/engine"
)

// FileError says which file, and which tensor in it, is at fault. It wraps engine.ErrCorrupt if the
// file is malformed, else the error of its ReaderAt.
type FileError struct {
	File   string
	Tensor string // empty: none in particular
	Err    error
}

// Error names the file, the tensor and the cause.
func (e *FileError) Error() string {
	if e.Tensor == "" {
		return fmt.Sprintf("%s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("%s: tensor %q: %v", e.File, e.Tensor, e.Err)
}

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

// faulty returns the error of a malformed file. It shortens long names of tensors.
func faulty(file, tensor, format string, args ...any) error {
	const most = 200
	if len(tensor) > most {
		tensor = tensor[:most] + "…"
	}
	return &FileError{File: file, Tensor: tensor, Err: fmt.Errorf(format+": %w",
		append(args, engine.ErrCorrupt)...)}
}
