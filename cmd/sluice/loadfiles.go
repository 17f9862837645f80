// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/sluicehq/sluice/kv/weights"
)

// opened is the files that a load has open.
type opened struct{ files []*weights.File }

// file opens one; name is what errors call it.
func (o *opened) file(path, name string) (weights.Source, error) {
	f, err := weights.OpenFile(path)
	if err != nil {
		return weights.Source{}, err
	}
	o.files = append(o.files, f)
	src := f.Source()
	src.Name = name
	return src, nil
}

// drop has the kernel forget what it has of the files.
func (o *opened) drop() error {
	var errs []error
	for _, f := range o.files {
		errs = append(errs, f.Drop())
	}
	return errors.Join(errs...)
}

// cached is how much of the files is in the page cache; -1: not known.
func (o *opened) cached() (sum int64) {
	for _, f := range o.files {
		n, known := f.Cached()
		if !known {
			return -1
		}
		sum += n
	}
	return sum
}

// passed is how much was read past the page cache.
func (o *opened) passed() (sum int64) {
	for _, f := range o.files {
		sum += f.Passed()
	}
	return sum
}

func (o *opened) close() error {
	var errs []error
	for _, f := range o.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
