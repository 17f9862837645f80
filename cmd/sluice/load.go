// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/tier/object/s3"
	"github.com/sluicehq/sluice/kv/weights"
)

func newLoad() *cobra.Command {
	var cold, asJSON bool
	var store s3.Config
	c := &cobra.Command{
		Use:   "load FILE...",
		Short: "Read safetensors files into memory, and say how fast",
		Long: `Read the tensors of a model's safetensors files into memory: in large pieces, several at a
time. A FILE that ends in .index.json is the index of a sharded model: the files that it names
are read, once each. s3://BUCKET/NAME is an object of an S3 store, or all .safetensors below it;
credentials come from the usual places ($AWS_ACCESS_KEY_ID, ~/.aws, the role of the machine).

Bytes go past the page cache where the filesystem lets them, unless half of a file is in it; --cold
drops the files from it first.`,
		Example: `  sluice load model-00001-of-00002.safetensors model-00002-of-00002.safetensors
  sluice load --cold --json model/*.safetensors
  sluice load model/model.safetensors.index.json
  sluice load s3://models/llama-70b`,
		RunE: func(c *cobra.Command, files []string) (err error) {
			if len(files) == 0 {
				return usagef("want at least one file")
			}
			l := &loading{store: store, res: loadReport{Cold: cold}}
			defer func() {
				for _, f := range l.files {
					err = errors.Join(err, f.Close())
				}
			}()
			if err := l.load(c.Context(), files, c.ErrOrStderr()); err != nil {
				return err
			}
			if asJSON {
				return printJSON(c.OutOrStdout(), &l.res)
			}
			return l.res.text(c.OutOrStdout())
		},
	}
	s := c.Flags()
	s.BoolVar(&cold, "cold", false, "drop the files from the page cache first")
	s.BoolVar(&asJSON, "json", false, "print JSON")
	registerStore(s, &store)
	return c
}

// loading is the state of one run of sluice load.
type loading struct {
	files []*weights.File // open
	store s3.Config
	res   loadReport
}

// load opens the files, drops them from the page cache where that was asked for, and reads all
// tensors.
func (l *loading) load(ctx context.Context, paths []string, stderr io.Writer) error {
	began := time.Now()
	model, err := l.open(ctx, paths)
	if err != nil {
		return err
	}
	l.res.HeaderSeconds = time.Since(began).Seconds()
	l.res.Files = len(l.files) + l.res.Objects
	for _, t := range model.Tensors() {
		l.res.Tensors++
		l.res.Bytes += t.Len
	}
	for _, f := range l.files {
		if l.res.Cold {
			if err := f.Drop(); err != nil {
				return err
			}
		}
		n, known := f.Cached()
		if !known {
			l.res.CachedBytes = -1
			break
		}
		l.res.CachedBytes += n
	}
	need, err := model.MemoryFor(nil)
	if err != nil {
		return err
	}
	need = max(need, 1)
	if have := hostmem.Limits().Available; have > 0 && uint64(need) > have {
		return fmt.Errorf("the tensors take %s of memory, %s are available: give fewer files",
			figures.RoundSize(uint64(need)), figures.RoundSize(have))
	}
	memory, err := hostmem.Alloc(uint64(need), hostmem.Options{Purpose: "weights", Populate: true})
	if err != nil {
		return fmt.Errorf("allocate memory for the tensors: %w", err)
	}
	defer memory.Close()
	l.res.MemoryBytes = need

	readers := 0 // the default of files
	if l.res.Objects > 0 {
		readers = objectReaders
	}
	began = time.Now()
	load, err := model.Load(ctx, weights.Config{Memory: memory.Bytes(), Straight: true,
		Readers: readers})
	if err != nil {
		return err
	}
	bar := newProgress(stderr, l.res.Bytes, "load")
	defer bar.clear()
	read := int64(0)
	for t, failed := range load.All(ctx) {
		if failed != nil {
			err = failed
			break
		}
		if read == 0 {
			l.res.FirstMs = float64(time.Since(began)) / float64(time.Millisecond)
		}
		read += t.Len
		bar.set(read)
	}
	took := time.Since(began)
	l.res.Seconds, l.res.GBps = took.Seconds(), figures.GBps(uint64(read), took)
	for _, f := range l.files {
		l.res.StraightBytes += f.Passed()
	}
	return errors.Join(err, load.Close())
}

// objectReaders is how many requests for an object run at a time.
const objectReaders = 16

// open opens files, objects, and files that indexes name, each once.
func (l *loading) open(ctx context.Context, paths []string) (*weights.Model, error) {
	var sources []weights.Source
	add := func(path string) error {
		if slices.ContainsFunc(sources, func(s weights.Source) bool { return s.Name == path }) {
			return nil
		}
		f, err := weights.OpenFile(path)
		if err != nil {
			return err
		}
		l.files = append(l.files, f)
		src := f.Source()
		src.Name = path // as errors call it
		sources = append(sources, src)
		return nil
	}
	indexes := map[string]weights.Index{} // by path
	for _, path := range paths {
		if strings.HasPrefix(path, "s3://") {
			list, err := objectsOf(ctx, path, l.store)
			if err != nil {
				return nil, err
			}
			sources, l.res.Objects = append(sources, list...), l.res.Objects+len(list)
			continue
		}
		path = filepath.Clean(path)
		if !strings.HasSuffix(path, ".index.json") {
			if err := add(path); err != nil {
				return nil, fmt.Errorf("weights: %w", err)
			}
			continue
		}
		f, err := weights.OpenFile(path)
		if err != nil {
			return nil, fmt.Errorf("weights: %w", err)
		}
		x, err := weights.ReadIndex(f.Source())
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("weights: %w", err)
		}
		indexes[path] = x
		dir := filepath.Dir(path)
		for _, name := range x.Files {
			if err := add(filepath.Join(dir, filepath.FromSlash(name))); err != nil {
				return nil, fmt.Errorf("weights: %w", err)
			}
		}
	}
	model, err := weights.Open(sources...)
	for path, x := range indexes {
		if err == nil {
			err = x.Check(model, func(src weights.Source) string {
				name, _ := filepath.Rel(filepath.Dir(path), src.Name)
				return filepath.ToSlash(name)
			})
		}
	}
	return model, err
}

// loadReport is the outcome. The JSON keys are an interface: keys may be added, never renamed.
type loadReport struct {
	Files         int     `json:"files"`
	Objects       int     `json:"objects,omitempty"` // of those
	Tensors       int     `json:"tensors"`
	Bytes         int64   `json:"bytes"` // of all tensors
	Seconds       float64 `json:"seconds"`
	GBps          float64 `json:"gbps"`
	HeaderSeconds float64 `json:"header_seconds"`  // opening files, and reading their headers
	FirstMs       float64 `json:"first_tensor_ms"` // until there was one
	Cold          bool    `json:"cold"`            // --cold
	// of the files, in the page cache before; -1: the kernel does not say
	CachedBytes   int64 `json:"cached_bytes"`
	StraightBytes int64 `json:"straight_bytes"` // that went past the page cache
	MemoryBytes   int64 `json:"memory_bytes"`
}

func (r *loadReport) text(w io.Writer) error {
	cache := "unknown page cache"
	switch {
	case r.Objects == r.Files:
		cache = "no page cache: the files are in an object store"
	case r.CachedBytes == 0 || r.Cold && r.CachedBytes < 0:
		cache = "cold page cache"
	case r.Cold:
		cache = fmt.Sprintf("warm page cache: the file system keeps %s of the files in it, "+
			"whatever --cold says", figures.RoundSize(uint64(r.CachedBytes)))
	case r.CachedBytes > 0:
		cache = fmt.Sprintf("warm page cache: %s of the files were in it",
			figures.RoundSize(uint64(r.CachedBytes)))
	}
	_, err := fmt.Fprintf(w, `files       %d, headers in %.3f s
tensors     %d, %s
loaded      in %.3f s: %.2f GB/s, the first after %.1f ms
cache       %s; %s went past it
memory      %s
`,
		r.Files, r.HeaderSeconds, r.Tensors, figures.RoundSize(uint64(r.Bytes)), r.Seconds, r.GBps,
		r.FirstMs, cache, figures.RoundSize(uint64(r.StraightBytes)),
		figures.RoundSize(uint64(r.MemoryBytes)))
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
