// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"

	"github.com/sluicehq/sluice/engine"
)

// A set is a model that was cut for its ranks beforehand: one file, the root, names a meta file for
// each rank; a meta names the rank's safetensors files. Each names what is below it by size and
// digest, so that the root stands for all headers of the set: a rank finds its own files with two
// small reads, and no file of another set passes for one of this. The digests do not cover the
// tensors' bytes.

const (
	setFormat  = "sluice-weights"
	setVersion = 1
	setMax     = 16 << 20 // bytes of a root or meta
	ranksMax   = 1 << 16
	filesMax   = 1 << 16 // of a rank
)

type rootFile struct {
	Format  string     `json:"format"`
	Version int        `json:"version"`
	Ranks   []namedRef `json:"ranks"`
}

type metaFile struct {
	Format  string     `json:"format"`
	Version int        `json:"version"`
	Rank    int        `json:"rank"`
	Ranks   int        `json:"ranks"` // in all
	Files   []namedRef `json:"files"`
}

// namedRef is one file of a set. The digest is that of a meta, or of a data file's header.
type namedRef struct {
	Name   string `json:"name"` // slashes, relative to the root's folder
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Set is what Describe makes: the root and metas that belong to data files.
type Set struct {
	Root  []byte
	Metas map[string][]byte // by name
}

// Describe makes the root and metas for the data files of each rank. Names of sources are what the
// set calls them, meta names the meta of a rank; all are relative to the root's folder, with
// slashes.
func Describe(ranks [][]Source, meta func(rank int) string) (Set, error) {
	set := Set{Metas: map[string][]byte{}}
	root := rootFile{Format: setFormat, Version: setVersion, Ranks: []namedRef{}}
	for rank, files := range ranks {
		m := metaFile{Format: setFormat, Version: setVersion, Rank: rank, Ranks: len(ranks),
			Files: []namedRef{}}
		_, err := open(files, func(i int, header []byte) error {
			m.Files = append(m.Files, namedRef{files[i].Name, files[i].Size, digest(header)})
			return nil
		})
		if err != nil {
			return Set{}, fmt.Errorf("describe rank %d: %w", rank, err)
		}
		text := encode(m)
		name := meta(rank)
		if _, twice := set.Metas[name]; twice {
			return Set{}, fmt.Errorf("describe rank %d: %s is another rank's meta: %w", rank, name,
				fs.ErrExist)
		}
		set.Metas[name] = text
		root.Ranks = append(root.Ranks, namedRef{name, int64(len(text)), digest(text)})
		if err := checkRefs(name, m.Files, filesMax); err != nil {
			return Set{}, fmt.Errorf("describe rank %d: %w", rank, err)
		}
		if len(text) > setMax {
			return Set{}, fmt.Errorf("describe rank %d: the meta has %d bytes of at most %d: use "+
				"fewer files: %w", rank, len(text), setMax, engine.ErrBounds)
		}
	}
	set.Root = encode(root)
	if err := checkRefs("the root", root.Ranks, ranksMax); err != nil {
		return Set{}, fmt.Errorf("describe weights: %w", err)
	}
	if len(set.Root) > setMax {
		return Set{}, fmt.Errorf("describe weights: the root has %d bytes of at most %d: %w",
			len(set.Root), setMax, engine.ErrBounds)
	}
	return set, nil
}

// encode writes one JSON object. Its types have nothing that cannot be written.
func encode(v any) []byte {
	b, _ := json.MarshalIndent(v, "", " ")
	return append(b, '\n')
}

// OpenRank opens the files of one rank of a set: files opens one by its name, and what it has
// opened is the caller's to close, also after an error.
func OpenRank(files func(name string) (Source, error), root string, rank int) (*Model, error) {
	var r rootFile
	if _, err := readSmall(files, root, &r); err != nil {
		return nil, err
	}
	if err := checkHead(root, r.Format, r.Version); err != nil {
		return nil, err
	}
	if err := checkRefs(root, r.Ranks, ranksMax); err != nil {
		return nil, err
	}
	if rank < 0 || rank >= len(r.Ranks) {
		return nil, fmt.Errorf("open rank %d: %s has ranks 0 to %d: %w", rank, root, len(r.Ranks)-1,
			engine.ErrBounds)
	}
	m, err := openMeta(files, root, r.Ranks[rank], rank, len(r.Ranks))
	if err != nil {
		return nil, err
	}
	sources := make([]Source, len(m.Files))
	for i, f := range m.Files {
		if sources[i], err = files(f.Name); err != nil {
			return nil, &FileError{File: f.Name, Err: err}
		}
		if sources[i].Size != f.Size {
			return nil, faulty(f.Name, "", "it has %d bytes where %s says %d: it is cut, or of "+
				"another set", sources[i].Size, r.Ranks[rank].Name, f.Size)
		}
	}
	return open(sources, func(i int, header []byte) error {
		if digest(header) != m.Files[i].SHA256 {
			return faulty(m.Files[i].Name, "", "its header is not what %s says: it is of "+
				"another set", r.Ranks[rank].Name)
		}
		return nil
	})
}

func openMeta(files func(name string) (Source, error), root string, ref namedRef, rank, ranks int) (
	m metaFile, err error) {
	text, err := readSmall(files, ref.Name, &m)
	switch {
	case err != nil:
		return m, err
	case int64(len(text)) != ref.Size || digest(text) != ref.SHA256:
		return m, faulty(ref.Name, "", "it is not the file that %s names: it is of another set",
			root)
	case m.Rank != rank || m.Ranks != ranks:
		return m, faulty(ref.Name, "", "it is of rank %d of %d, where %s has it as rank %d of %d",
			m.Rank, m.Ranks, root, rank, ranks)
	}
	if err := checkHead(ref.Name, m.Format, m.Version); err != nil {
		return m, err
	}
	return m, checkRefs(ref.Name, m.Files, filesMax)
}

// readSmall reads a root or meta, strictly.
func readSmall(files func(name string) (Source, error), name string, into any) ([]byte, error) {
	src, err := files(name)
	if err != nil {
		return nil, &FileError{File: name, Err: err}
	}
	if src.Size < 0 || src.Size > setMax {
		return nil, faulty(name, "", "%d bytes, of at most %d", src.Size, setMax)
	}
	text := make([]byte, src.Size)
	src.Name = name
	if err := readFull(src, text, 0); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return nil, faulty(name, "", "not a file of a set: %v", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, faulty(name, "", "something follows its object")
	}
	return text, nil
}

func checkHead(name, format string, version int) error {
	if format != setFormat {
		return faulty(name, "", "its format is %.40q, want %q", format, setFormat)
	}
	if version != setVersion {
		return &FileError{File: name, Err: fmt.Errorf("version %d, this build reads %d: %w",
			version, setVersion, engine.ErrVersion)}
	}
	return nil
}

// checkRefs wants names that stay below the root's folder, once each.
func checkRefs(file string, list []namedRef, most int) error {
	if len(list) > most {
		return faulty(file, "", "it names %d files, of at most %d", len(list), most)
	}
	seen := make(map[string]bool, len(list))
	for _, r := range list {
		if !fs.ValidPath(r.Name) || r.Name == "." || seen[r.Name] || r.Size < 0 {
			return faulty(file, "", "it names %.200q, of %d bytes: no name below its "+
				"folder, or twice", r.Name, r.Size)
		}
		seen[r.Name] = true
	}
	return nil
}
