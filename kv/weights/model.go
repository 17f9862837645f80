// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"fmt"
	"io/fs"

	"github.com/sluicehq/sluice/engine"
)

// Model describes the tensors of one or more files. Any goroutine may use it.
type Model struct {
	sources []Source
	tensors []Tensor
	byName  map[string]int
}

// Open reads and checks the headers of a model's files. A tensor name that appears in two files is
// an error.
func Open(files ...Source) (*Model, error) {
	m := &Model{sources: files, byName: map[string]int{}}
	for i, src := range files {
		h, err := readHeader(src)
		if err != nil {
			return nil, err
		}
		for _, t := range h.Tensors {
			if other, twice := m.byName[t.Name]; twice {
				return nil, faulty(src.Name, t.Name, "%s has it, too",
					files[m.tensors[other].file].Name)
			}
			t.file = i
			m.byName[t.Name] = len(m.tensors)
			m.tensors = append(m.tensors, t)
		}
	}
	return m, nil
}

// Tensors returns all tensors, in the order of files and offsets. The caller must not change the
// list.
func (m *Model) Tensors() []Tensor { return m.tensors }

// Tensor finds a tensor by its name.
func (m *Model) Tensor(name string) (Tensor, bool) {
	i, ok := m.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return m.tensors[i], true
}

// MemoryFor returns how many bytes of Config.Memory are enough to hold all tensors of these names
// at once, read in this order, with Config.Straight or without; nil means all tensors.
func (m *Model) MemoryFor(names []string) (bytes int64, err error) {
	chosen, err := m.choose(names)
	if err != nil {
		return 0, err
	}
	file, end := -1, int64(0)
	for _, t := range chosen {
		if t.Len == 0 {
			continue
		}
		if t.file != file || t.offset != end {
			bytes += pageBytes
		}
		file, end = t.file, t.offset+t.Len
		if bytes += t.Len; bytes < 0 {
			return 0, fmt.Errorf("load weights: the tensors have more bytes than there can be: %w",
				engine.ErrBounds)
		}
	}
	return bytes, nil
}

// choose returns the tensors of these names; nil means all.
func (m *Model) choose(names []string) ([]Tensor, error) {
	if names == nil {
		return m.tensors, nil
	}
	chosen := make([]Tensor, 0, len(names))
	seen := map[string]bool{}
	for _, name := range names {
		t, ok := m.Tensor(name)
		switch {
		case !ok:
			return nil, fmt.Errorf("load weights: no file has a tensor %q: %w", name,
				fs.ErrNotExist)
		case seen[name]:
			return nil, fmt.Errorf("load weights: tensor %q is wanted twice: %w", name, fs.ErrExist)
		}
		seen[name] = true
		chosen = append(chosen, t)
	}
	return chosen, nil
}
