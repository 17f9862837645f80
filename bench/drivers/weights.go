// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/weights"
)

// weightsEnd loads safetensors files of FarBytes in all into memory, with nothing of them in the
// page cache: by package weights, by a mapping that is copied, as a program does that knows nothing
// better, or by fio, which reads the files in order in pieces of the same size. The files have no
// names, and end with the process.
type weightsEnd struct {
	base
	load    func(*weightsEnd, context.Context) error
	about   string
	checked bool // each tensor is compared once
	folder  string
	open    []*os.File
	files   []*weights.File   // the same
	sums    map[string]uint32 // of each tensor
	bytes   uint64
	model   *weights.Model
	memory  *hostmem.Buffer
}

// What a load is by default, of files as models have them.
const (
	weightsFiles  = 4
	weightsTensor = 16 << 20
	weightsPiece  = 8 << 20
	weightsDepth  = 4
)

// weightsWays are the ways to load.
var weightsWays = map[string]struct {
	load  func(*weightsEnd, context.Context) error
	about string
}{
	"ours": {(*weightsEnd).ours, "package weights, all into one memory"},
	"mmap": {(*weightsEnd).mapAndCopy, "mmap and copy, a file after the other"},
	"fio":  {(*weightsEnd).fio, "fio, io_uring and O_DIRECT, 4 pieces of 8 MiB at a time"},
}

// newWeights takes a folder on the disk that is measured.
func newWeights(way string) func(args []string) (end, error) {
	return func(args []string) (end, error) {
		if len(args) != 1 {
			return nil, errors.New("want one argument, a folder")
		}
		w := weightsWays[way]
		return &weightsEnd{load: w.load, about: w.about, checked: way == "ours", folder: args[0],
			sums: map[string]uint32{}}, nil
	}
}

// Open implements bench.End.
func (e *weightsEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if err := onlyLane(r, bench.Weights); err != nil {
		return a, err
	}
	tensors := max(r.FarBytes/weightsFiles/weightsTensor, 1)
	var sources []weights.Source
	for i := range weightsFiles {
		f, err := e.make(i, tensors)
		if err != nil {
			return a, fmt.Errorf("make the files: %w", err)
		}
		e.files, sources = append(e.files, f), append(sources, f.Source())
	}
	if e.model, err = weights.Open(sources...); err != nil {
		return a, err
	}
	need, err := e.model.MemoryFor(nil)
	if err != nil {
		return a, err
	}
	e.memory, err = hostmem.Alloc(uint64(need), hostmem.Options{Purpose: "bench", Populate: true})
	return bench.Answer{Version: "safetensors", Settings: fmt.Sprintf("%s; %d files of %d tensors",
		e.about, weightsFiles, tensors)}, err
}

// make writes a file of random tensors. It stays open, so that fio finds it below /proc.
func (e *weightsEnd) make(number int, tensors uint64) (*weights.File, error) {
	f, err := os.CreateTemp(e.folder, "bench-*")
	if err != nil {
		return nil, err
	}
	e.open = append(e.open, f)
	if err := os.Remove(f.Name()); err != nil {
		return nil, err
	}
	var list []weights.Tensor
	for i := range tensors {
		list = append(list, weights.Tensor{Name: fmt.Sprintf("%d.%d", number, i), Type: "U8",
			Shape: []uint64{weightsTensor}})
		e.bytes += weightsTensor
	}
	random, b := rand.NewChaCha8([32]byte{byte(number)}), make([]byte, weightsTensor)
	err = weights.Write(f, list, nil, func(t weights.Tensor) (io.Reader, error) {
		random.Read(b)
		e.sums[t.Name] = crc32.ChecksumIEEE(b)
		return bytes.NewReader(b), nil
	})
	if err != nil {
		return nil, err
	}
	return weights.OpenFile(pathOf(f))
}

// pathOf is where other processes find a file without a name.
func pathOf(f *os.File) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()) }

// weightsPosting measures loads.
type weightsPosting struct {
	measuring
	bytes uint64
}

// Bytes implements bench.Sizer.
func (p weightsPosting) Bytes() uint64 { return p.bytes }

// Prepare implements bench.End. It loads the model once, and compares each tensor.
func (e *weightsEnd) Prepare(string, uint64, []int32, []int32) (bench.Posting, error) {
	if e.checked {
		wrong := func(t weights.Loaded) error {
			if crc32.ChecksumIEEE(t.Bytes) != e.sums[t.Name] {
				return fmt.Errorf("tensor %s is not what was written: %w", t.Name,
					bench.ErrNonsense)
			}
			return nil
		}
		if err := e.all(context.Background(), wrong); err != nil {
			return nil, err
		}
	}
	return weightsPosting{func(ctx context.Context) (time.Duration, error) {
		for _, f := range e.files {
			if err := f.Drop(); err != nil {
				return 0, err
			}
		}
		begin := time.Now()
		err := e.load(e, ctx)
		return time.Since(begin), err
	}, e.bytes}, nil
}

func (e *weightsEnd) ours(ctx context.Context) error {
	return e.all(ctx, func(weights.Loaded) error { return nil })
}

// all loads the model, and has each tensor looked at.
func (e *weightsEnd) all(ctx context.Context, look func(weights.Loaded) error) error {
	l, err := e.model.Load(ctx, weights.Config{Memory: e.memory.Bytes(), Straight: true})
	if err != nil {
		return err
	}
	for t, failed := range l.All(ctx) {
		if err = failed; err == nil {
			err = look(t)
		}
		if err != nil {
			break
		}
	}
	return errors.Join(err, l.Close())
}

func (e *weightsEnd) mapAndCopy(context.Context) error {
	memory := e.memory.Bytes()
	for _, f := range e.open {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		b, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
		if err != nil {
			return os.NewSyscallError("mmap", err)
		}
		memory = memory[copy(memory, b[info.Size()%weightsTensor:]):] // without the header
		if err := unix.Munmap(b); err != nil {
			return os.NewSyscallError("munmap", err)
		}
	}
	return nil
}

func (e *weightsEnd) fio(ctx context.Context) error {
	var paths []string
	for _, f := range e.open {
		paths = append(paths, pathOf(f))
	}
	_, err := runFio(ctx, "read", []string{"--filename=" + strings.Join(paths, ":"),
		fmt.Sprint("--bs=", weightsPiece), fmt.Sprint("--iodepth=", weightsDepth),
		fmt.Sprint("--size=", e.bytes), "--file_service_type=sequential", "--direct=1",
		"--readonly"})
	return err
}

func (e *weightsEnd) close() {
	for _, f := range e.files {
		f.Close()
	}
	for _, f := range e.open {
		f.Close()
	}
	if e.memory != nil {
		e.memory.Close()
	}
}
