// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// folder is files by name.
type folder map[string][]byte

func (f folder) open(name string) (Source, error) {
	b, ok := f[name]
	if !ok {
		return Source{}, fs.ErrNotExist
	}
	return source(name, b), nil
}

// bytesOf reads a source that a test has made.
func bytesOf(t testing.TB, src Source) []byte {
	t.Helper()
	b := make([]byte, src.Size)
	require.NoError(t, readFull(src, b, 0))
	return b
}

func metaName(rank int) string { return fmt.Sprintf("rank-%d/meta.json", rank) }

// cutSet makes a set of three ranks, of two, one and no files.
func cutSet(t testing.TB) folder {
	t.Helper()
	ranks := [][]Source{{shard(t, "rank-0/0", 100, 200), shard(t, "rank-0/1", 300)},
		{shard(t, "rank-1/0", 100, 0)}, {}}
	set, err := Describe(ranks, metaName)
	require.NoError(t, err)
	f := folder{"root.json": set.Root}
	maps.Copy(f, set.Metas)
	for _, files := range ranks {
		for _, src := range files {
			f[src.Name] = bytesOf(t, src)
		}
	}
	return f
}

func TestSet(t *testing.T) {
	f := cutSet(t)
	for rank, tensors := range []int{3, 2, 0} {
		m, err := OpenRank(f.open, "root.json", rank)
		require.NoError(t, err)
		if len(m.Tensors()) != tensors {
			t.Errorf("rank %d has %d tensors, want %d", rank, len(m.Tensors()), tensors)
		}
		l := load(t, m, Config{Memory: make([]byte, 1000)})
		for x, err := range l.All(within(t)) {
			require.NoError(t, err)
			if same(t, x); !strings.HasPrefix(x.Name, fmt.Sprintf("rank-%d/", rank)) {
				t.Errorf("rank %d has %s", rank, x.Name)
			}
		}
	}
	if _, err := OpenRank(f.open, "root.json", 3); !errors.Is(err, engine.ErrBounds) ||
		!strings.Contains(err.Error(), "ranks 0 to 2") {
		t.Errorf("a rank that is not there: %v", err)
	}
}

// TestSpoiltSets changes one thing at a time. Where a meta is changed, the root's digest finds it,
// unless the root is made anew, too.
func TestSpoiltSets(t *testing.T) {
	replace := func(name, old, text string) func(folder) {
		return func(f folder) {
			if !bytes.Contains(f[name], []byte(old)) {
				panic("nothing to replace: " + old)
			}
			f[name] = bytes.Replace(f[name], []byte(old), []byte(text), 1)
		}
	}
	resealed := func(old, text string) func(folder) {
		return func(f folder) {
			name := metaName(0)
			before := namedRef{name, int64(len(f[name])), digest(f[name])}
			replace(name, old, text)(f)
			replace("root.json", fmt.Sprintf(`"size": %d`, before.Size), fmt.Sprintf(`"size": %d`,
				len(f[name])))(f)
			replace("root.json", before.SHA256, digest(f[name]))(f)
		}
	}
	for _, c := range []struct {
		name  string
		spoil func(folder)
		file  string
		want  error
	}{
		{"no root", func(f folder) { delete(f, "root.json") }, "root.json", fs.ErrNotExist},
		{"no meta", func(f folder) { delete(f, metaName(0)) }, metaName(0), fs.ErrNotExist},
		{"no data", func(f folder) { delete(f, "rank-0/1") }, "rank-0/1", fs.ErrNotExist},
		{"root cut", func(f folder) {
			f["root.json"] = f["root.json"][:50]
		}, "root.json", engine.ErrCorrupt},
		{"root twice", func(f folder) {
			f["root.json"] = append(f["root.json"], '{', '}')
		}, "root.json", engine.ErrCorrupt},
		{"root of another form", replace("root.json", "sluice-weights", "other"), "root.json",
			engine.ErrCorrupt},
		{"root with more", replace("root.json", `"format"`, `"more": 1, "format"`), "root.json",
			engine.ErrCorrupt},
		{"root of a later version", replace("root.json", `"version": 1`, `"version": 2`),
			"root.json", engine.ErrVersion},
		{"root too long", func(f folder) {
			f["root.json"] = make([]byte, setMax+1)
		}, "root.json", engine.ErrCorrupt},
		{"names outside", replace("root.json", "rank-1/meta.json", "../meta.json"), "root.json",
			engine.ErrCorrupt},
		{"absolute name", replace("root.json", "rank-1/meta.json", "/etc/meta.json"), "root.json",
			engine.ErrCorrupt},
		{"a meta twice", replace("root.json", "rank-1/meta.json", metaName(0)), "root.json",
			engine.ErrCorrupt},
		{"meta changed", replace(metaName(0), "rank-0/1", "rank-1/0"), metaName(0),
			engine.ErrCorrupt},
		{"meta of another rank", resealed(`"rank": 0`, `"rank": 1`), metaName(0),
			engine.ErrCorrupt},
		{"meta of another size of the world", resealed(`"ranks": 3`, `"ranks": 4`), metaName(0),
			engine.ErrCorrupt},
		{"meta of another form", resealed("sluice-weights", "other"), metaName(0),
			engine.ErrCorrupt},
		{"meta names outside", resealed("rank-0/1", "../1"), metaName(0), engine.ErrCorrupt},
		{"data cut", func(f folder) {
			f["rank-0/1"] = f["rank-0/1"][:len(f["rank-0/1"])-1]
		}, "rank-0/1", engine.ErrCorrupt},
		{"header changed", replace("rank-0/1", `"pt"`, `"qt"`), "rank-0/1", engine.ErrCorrupt},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := cutSet(t)
			c.spoil(f)
			var fault *FileError
			if _, err := OpenRank(f.open, "root.json", 0); !errors.As(err, &fault) ||
				fault.File != c.file || !errors.Is(err, c.want) {
				t.Errorf("%v, want %v of %s", err, c.want, c.file)
			}
		})
	}
}

func TestDescribeRefuses(t *testing.T) {
	one := shard(t, "a", 1)
	if _, err := Describe([][]Source{{one}, {one}}, func(int) string {
		return "meta.json"
	}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("one meta for two ranks: %v", err)
	}
	if _, err := Describe([][]Source{{one}}, func(int) string {
		return "../meta.json"
	}); !errors.Is(err, engine.ErrCorrupt) {
		t.Errorf("a meta outside: %v", err)
	}
	if _, err := Describe([][]Source{{shard(t, "../a", 1)}}, metaName); !errors.Is(err,
		engine.ErrCorrupt) {
		t.Errorf("data outside: %v", err)
	}
	if _, err := Describe([][]Source{{file("hello", 0)}}, metaName); !errors.Is(err,
		engine.ErrCorrupt) {
		t.Errorf("data that are no safetensors: %v", err)
	}
}

func FuzzSet(f *testing.F) {
	good := cutSet(f)
	f.Add(good["root.json"], good[metaName(0)])
	f.Add([]byte(`{}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, root, meta []byte) {
		all := maps.Clone(good)
		all["root.json"], all[metaName(0)] = root, meta
		m, err := OpenRank(all.open, "root.json", 0)
		var fault *FileError
		if err != nil && !errors.As(err, &fault) && !errors.Is(err, engine.ErrBounds) {
			t.Fatalf("an error of another kind: %v", err)
		}
		if err == nil && m == nil {
			t.Fatal("neither a model nor an error")
		}
	})
}
