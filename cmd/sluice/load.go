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

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/weights"
)

// loadFlags are the words of the command line.
type loadFlags struct {
	files        []string
	backend      backendSpec
	memory       string
	rank         int
	cold, asJSON bool

	isSet     bool // --rank was given: the file is the root of a set
	memoryMax uint64
}

func newLoad() *cobra.Command {
	f := loadFlags{backend: autoSpec()}
	c := &cobra.Command{
		Use:   "load FILE...",
		Short: "Read safetensors files into registered memory, and say how fast",
		Long: `Read the tensors of a model's safetensors files into memory that is registered with
the backends of an engine: in large pieces, several at a time. With --rank the one FILE
is the root of a set that was cut for its ranks beforehand, and the files of that rank
are read. A FILE that ends in .index.json is the index of a sharded model: the files that it
names are read, once each.

Bytes go past the page cache where the filesystem lets them, unless half of a file is in
it; --cold drops the files from it first. All tensors have their place in memory at once,
unless --memory is less: then each makes way for the next as soon as it is there.

` + specHelp,
		Example: `  sluice load model-00001-of-00002.safetensors model-00002-of-00002.safetensors
  sluice load --cold --json model/*.safetensors
  sluice load model/model.safetensors.index.json
  sluice load --rank 3 model-tp8/root.json`,
		RunE: func(c *cobra.Command, args []string) error { f.files = args; return runLoad(c, &f) },
	}
	s := c.Flags()
	s.IntVar(&f.rank, "rank", 0, "of a set: FILE is its root")
	s.Var(&f.backend, "backend", "what the memory is registered with: "+
		strings.Join(backendNames(driver.InProcess), ", "))
	s.StringVar(&f.memory, "memory", "", "`SIZE` of the memory to read into (default: room for "+
		"all tensors)")
	s.BoolVar(&f.cold, "cold", false, "drop the files from the page cache first")
	s.BoolVar(&f.asJSON, "json", false, "print JSON")
	return c
}

// check reads the flags; what is wrong with them is a usage error.
func (f *loadFlags) check(given func(flag string) bool) (err error) {
	f.isSet = given("rank")
	switch {
	case len(f.files) == 0:
		return usagef("want at least one file")
	case f.isSet && len(f.files) > 1:
		return usagef("--rank: want one file, the root of the set, not %d", len(f.files))
	case f.rank < 0:
		return usagef("--rank %d: want 0 or more", f.rank)
	}
	if f.memory == "" {
		return nil
	}
	if f.memoryMax, err = figures.ParseSize(f.memory); err != nil {
		return &usageError{fmt.Errorf("--memory: %w", err)}
	}
	return nil
}

// loading is one run of the command.
type loading struct {
	flags *loadFlags
	opened
	model *weights.Model
	all   bool // every tensor has its place at once
	res   loadReport
}

func runLoad(c *cobra.Command, f *loadFlags) (err error) {
	if err := f.check(c.Flags().Changed); err != nil {
		return err
	}
	l := &loading{flags: f}
	defer func() { err = errors.Join(err, l.close()) }()
	if err := l.open(c.Context()); err != nil {
		return err
	}
	memory, release, err := l.register()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	bar := newProgress(c.ErrOrStderr(), l.res.Bytes, "load")
	err = l.read(c.Context(), memory, bar)
	bar.clear()
	if err != nil {
		return err
	}
	if f.asJSON {
		return printJSON(c.OutOrStdout(), &l.res)
	}
	return l.res.text(c.OutOrStdout())
}

// open opens the files, drops them from the page cache where that was asked for, and reads
// their headers.
func (l *loading) open(ctx context.Context) (err error) {
	start := time.Now()
	if l.flags.isSet {
		root := l.flags.files[0]
		dir := filepath.Dir(root)
		l.model, err = weights.OpenRank(func(name string) (weights.Source, error) {
			return l.file(filepath.Join(dir, filepath.FromSlash(name)), name)
		}, filepath.Base(root), l.flags.rank)
	} else {
		l.model, err = l.openFiles(l.flags.files)
	}
	if err != nil {
		return err
	}
	l.res.HeaderSeconds = time.Since(start).Seconds()
	l.res.Files = len(l.files)
	if l.flags.isSet {
		l.res.Files -= 2 // root and meta
	}
	for _, t := range l.model.Tensors() {
		l.res.Tensors++
		l.res.Bytes += t.Len
	}
	l.res.Cold = l.flags.cold
	if l.flags.cold {
		if err := l.drop(); err != nil {
			return err
		}
	}
	l.res.CachedBytes = l.cached()
	return context.Cause(ctx)
}

// register makes the memory, and makes it known to the backends.
func (l *loading) register() (_ *engine.Memory, release func() error, err error) {
	need, err := l.model.MemoryFor(nil)
	if err != nil {
		return nil, nil, err
	}
	l.all = l.flags.memoryMax == 0 || int64(min(l.flags.memoryMax, 1<<62)) >= need
	if !l.all {
		need = int64(l.flags.memoryMax)
	}
	need = max(need, 1)
	if have := hostmem.Limits().Available; have > 0 && uint64(need) > have {
		return nil, nil, fmt.Errorf("the tensors take %s of memory, %s are available: give "+
			"--memory, or fewer files",
			figures.RoundSize(uint64(need)), figures.RoundSize(have))
	}
	list, err := l.flags.backend.open(1, driver.InProcess)
	if err != nil {
		return nil, nil, err
	}
	eng, err := engine.Open(engine.Config{Name: "load", Backends: list})
	if err != nil {
		return nil, nil, err
	}
	memory, err := eng.Alloc(uint64(need), engine.AllocOptions{Purpose: "weights", Populate: true})
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("allocate memory for the tensors: %w", err),
			eng.Close())
	}
	release = func() error { return errors.Join(eng.Close(), memory.Close()) }
	if _, err := eng.Register("weights", memory.Segment()); err != nil {
		return nil, nil, errors.Join(err, release())
	}
	for _, b := range list {
		if b.Caps().Pairs.Local().Has(driver.DRAM) {
			l.res.Registered = append(l.res.Registered, b.Caps().Name)
		}
	}
	l.res.MemoryBytes = need
	return memory, release, nil
}

// read reads all tensors.
func (l *loading) read(ctx context.Context, memory *engine.Memory, bar *progress) (err error) {
	start := time.Now()
	load, err := l.model.Load(ctx, weights.Config{Memory: memory.Bytes(), Straight: true})
	if err != nil {
		return fmt.Errorf("%w: give more --memory", err)
	}
	defer func() { err = errors.Join(err, load.Close()) }()
	read := int64(0)
	for t, err := range load.All(ctx) {
		if err != nil {
			return err
		}
		if read == 0 {
			l.res.FirstMs = float64(time.Since(start)) / float64(time.Millisecond)
		}
		read += t.Len
		bar.set(read)
		if !l.all {
			if err := load.Release(t.Name); err != nil {
				return err
			}
		}
	}
	took := time.Since(start)
	l.res.Seconds, l.res.GBps = took.Seconds(), figures.GBps(uint64(read), took)
	l.res.StraightBytes = l.passed()
	return nil
}

// loadReport is the outcome. The JSON keys are an interface: keys may be added, never renamed.
type loadReport struct {
	Files         int     `json:"files"`
	Tensors       int     `json:"tensors"`
	Bytes         int64   `json:"bytes"` // of all tensors
	Seconds       float64 `json:"seconds"`
	GBps          float64 `json:"gbps"`
	HeaderSeconds float64 `json:"header_seconds"`  // opening files, and reading their headers
	FirstMs       float64 `json:"first_tensor_ms"` // until there was one
	Cold          bool    `json:"cold"`            // --cold
	// of the files, in the page cache before; -1: the kernel does not say
	CachedBytes   int64    `json:"cached_bytes"`
	StraightBytes int64    `json:"straight_bytes"` // that went past the page cache
	MemoryBytes   int64    `json:"memory_bytes"`
	Registered    []string `json:"registered"` // backends that know the memory
}

func (r *loadReport) text(w io.Writer) error {
	cache := "unknown page cache"
	switch {
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
memory      %s, registered with %s
`,
		r.Files, r.HeaderSeconds, r.Tensors, figures.RoundSize(uint64(r.Bytes)), r.Seconds, r.GBps,
		r.FirstMs,
		cache, figures.RoundSize(uint64(r.StraightBytes)), figures.RoundSize(uint64(r.MemoryBytes)),
		strings.Join(slices.Sorted(slices.Values(r.Registered)), ", "))
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
