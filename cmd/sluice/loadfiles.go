// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

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

// index is one of a sharded model, and the folder of its files.
type index struct {
	weights.Index
	dir string
}

// openFiles opens files and those that indexes name: of an index with its files beside it, each is
// opened once.
func (o *opened) openFiles(paths []string) (*weights.Model, error) {
	var indexes []index
	var shards, list []string
	for _, path := range paths {
		if !strings.HasSuffix(path, ".index.json") {
			list = append(list, path)
			continue
		}
		x, err := readIndex(path)
		if err != nil {
			return nil, fmt.Errorf("weights: %w", err)
		}
		indexes = append(indexes, x)
		for _, name := range x.Files {
			shards = append(shards, x.path(name))
		}
	}
	named := map[string]bool{}
	for _, path := range list {
		named[filepath.Clean(path)] = true
	}
	for _, path := range shards {
		if !named[path] {
			named[path] = true
			list = append(list, path)
		}
	}
	var sources []weights.Source
	for _, path := range list {
		src, err := o.file(path, path)
		if err != nil {
			return nil, fmt.Errorf("weights: %w", err)
		}
		sources = append(sources, src)
	}
	model, err := weights.Open(sources...)
	for _, x := range indexes {
		if err == nil {
			err = x.check(model)
		}
	}
	return model, err
}

func readIndex(path string) (x index, err error) {
	f, err := weights.OpenFile(path)
	if err != nil {
		return x, err
	}
	x.dir = filepath.Dir(path)
	x.Index, err = weights.ReadIndex(f.Source())
	return x, errors.Join(err, f.Close())
}

// path is where a file of the index lies.
func (x *index) path(name string) string { return filepath.Join(x.dir, filepath.FromSlash(name)) }

// check finds tensors that are not where the index says.
func (x *index) check(m *weights.Model) error {
	names := map[string]string{}
	for _, name := range x.Files {
		names[x.path(name)] = name
	}
	return x.Check(m, func(src weights.Source) string { return names[filepath.Clean(src.Name)] })
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
