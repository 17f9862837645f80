// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io/fs"
	"maps"
	"slices"
	"strings"
)

// Index is the content of model.safetensors.index.json, which says which file of a sharded model
// holds which tensor.
type Index struct {
	Files   []string          // sorted and unique; slash-separated, relative to the index
	Tensors map[string]string // file by name of the tensor
}

const filesMax = 1 << 16 // of an index

// ReadIndex reads an index.
func ReadIndex(src Source) (x Index, err error) {
	if src.Size < 0 || src.Size > HeaderMax {
		return x, faulty(src.Name, "", "%d bytes, of at most %d", src.Size, HeaderMax)
	}
	text := make([]byte, src.Size)
	if err := readFull(src, text, 0); err != nil {
		return x, err
	}
	var said struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	switch err := json.Unmarshal(text, &said); {
	case err != nil:
		err = faulty(src.Name, "", "no index of a model: %v", err)
		if !bytes.HasPrefix(text, []byte("{")) { // a pointer of Git LFS, for one
			err = cmp.Or(otherKind(src), err)
		}
		return x, err
	case len(said.WeightMap) == 0:
		return x, faulty(src.Name, "", "no index of a model: it has no weight_map")
	}
	x.Tensors = said.WeightMap
	x.Files = slices.Compact(slices.Sorted(maps.Values(said.WeightMap)))
	for _, name := range x.Files {
		if !fs.ValidPath(name) || name == "." {
			return Index{}, faulty(src.Name, "", "it names %.200q: no name below its folder", name)
		}
	}
	if len(x.Files) > filesMax {
		return Index{}, faulty(src.Name, "", "it names %d files, of at most %d", len(x.Files),
			filesMax)
	}
	return x, nil
}

// Check returns an error if the model lacks a tensor of the index, or has it in another file. name
// returns the name that the index uses for a file of the model.
func (x *Index) Check(m *Model, name func(src Source) string) error {
	for _, tensor := range slices.Sorted(maps.Keys(x.Tensors)) {
		t, ok := m.Tensor(tensor)
		if !ok || name(m.sources[t.file]) != x.Tensors[tensor] {
			return faulty(x.Tensors[tensor], tensor, "the index says that it is there, and it "+
				"is not")
		}
	}
	return nil
}

// otherKind returns an error that names the format of a file that is often mistaken for a
// safetensors file; nil: it is none of these.
func otherKind(src Source) error {
	first := make([]byte, min(512, max(src.Size, 0)))
	if readFull(src, first, 0) != nil {
		return nil
	}
	begins := func(with string) bool { return bytes.HasPrefix(first, []byte(with)) }
	text := strings.ToLower(string(bytes.TrimLeft(first, " \t\r\n\ufeff")))
	switch {
	case src.Size == 0:
		return faulty(src.Name, "", "it is empty: download it again")
	case begins("version https://git-lfs"):
		return faulty(src.Name, "", "it is a pointer of Git LFS, and not the file: git lfs pull")
	case begins("PK\x03\x04"), begins("\x80") && len(first) > 1 && first[1] <= 5:
		return faulty(src.Name, "", "it is a pickle of PyTorch's: name the .safetensors files, or "+
			"convert it")
	case begins("GGUF"):
		return faulty(src.Name, "", "it is a GGUF file: name the .safetensors files")
	case strings.HasPrefix(text, "<!doctype"), strings.HasPrefix(text, "<html"),
		strings.HasPrefix(text, "<?xml"):
		return faulty(src.Name, "", "it is a web page: download it again, signed in where need be")
	case strings.HasPrefix(text, "{"):
		return faulty(src.Name, "", "it is JSON: an index of a model is read as "+
			"NAME.index.json; else name the .safetensors files")
	}
	return nil
}
