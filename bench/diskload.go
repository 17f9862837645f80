// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/weights"
)

// The shape of a load: what package weights does by default, of files as models have them.
const (
	loadFiles  = 4
	loadTensor = 16 << 20
	loadPiece  = 8 << 20
	loadDepth  = 4
)

// diskLoad is the load of a model, file by file, with nothing of it in the page cache.
type diskLoad struct {
	paths  []string
	files  []*weights.File
	model  *weights.Model
	memory *hostmem.Buffer
	bytes  uint64
}

// Load measures how fast package weights brings safetensors files of so many bytes in all from
// a directory into memory, beside fio that reads the same files in order, and beside a program
// that maps them and copies. Nothing of them is in the page cache at first. The files are made
// anew, and removed.
func Load(ctx context.Context, dir string, bytes uint64, o Options) (_ Result, err error) {
	if o.Rounds <= 0 {
		o.Rounds = 3
	}
	d := &diskLoad{}
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.make(dir, bytes); err != nil {
		return Result{}, err
	}
	ways := []diskWay{
		{"weights", d.load},
		{FioName, d.fio},
		{"mmap-copy", func(context.Context) (diskFigure, error) { return d.mapAndCopy() }},
	}
	figures, notes := make([][]diskFigure, len(ways)), []string(nil)
	for round := range o.Rounds {
		for i := range ways {
			way := (i + round) % len(ways)
			f, err := d.cold(ctx, ways[way].run)
			switch {
			case ctx.Err() != nil:
				return Result{}, context.Cause(ctx)
			case err != nil && way == 0:
				return Result{}, err
			case err != nil && round == 0:
				notes = append(notes, err.Error())
			case err == nil:
				figures[way] = append(figures[way], f)
			}
		}
	}
	return d.sum(ways, figures, notes, o.Rounds), nil
}

// make writes the files.
func (d *diskLoad) make(dir string, bytes uint64) error {
	per := max(bytes/loadFiles/loadTensor, 1)
	random := rand.NewChaCha8([32]byte{1})
	for i := range loadFiles {
		path := filepath.Join(dir, fmt.Sprintf("load-%d.safetensors", i))
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		d.paths = append(d.paths, path)
		var list []weights.Tensor
		for k := range per {
			list = append(list, weights.Tensor{Name: fmt.Sprintf("%d.%d", i, k), Type: "U8",
				Shape: []uint64{loadTensor}})
			d.bytes += loadTensor
		}
		err = weights.Write(f, list, nil, func(weights.Tensor) (io.Reader, error) {
			return random, nil
		})
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("make the files: %w", err)
		}
	}
	return d.open()
}

func (d *diskLoad) open() (err error) {
	var list []weights.Source
	for _, path := range d.paths {
		f, err := weights.OpenFile(path)
		if err != nil {
			return err
		}
		d.files = append(d.files, f)
		list = append(list, f.Source())
	}
	if d.model, err = weights.Open(list...); err != nil {
		return err
	}
	need, err := d.model.MemoryFor(nil)
	if err == nil {
		d.memory, err = hostmem.Alloc(uint64(need), hostmem.Options{Purpose: "bench",
			Populate: true})
	}
	return err
}

// cold runs one way with nothing in the page cache.
func (d *diskLoad) cold(ctx context.Context, run func(context.Context) (diskFigure, error)) (
	diskFigure, error) {
	for _, f := range d.files {
		if err := f.Drop(); err != nil {
			return diskFigure{}, err
		}
	}
	return run(ctx)
}

func (d *diskLoad) load(ctx context.Context) (diskFigure, error) {
	begin, used := time.Now(), processTime()
	l, err := d.model.Load(ctx, weights.Config{Memory: d.memory.Bytes(), Straight: true})
	if err != nil {
		return diskFigure{}, err
	}
	for _, err = range l.All(ctx) {
		if err != nil {
			break
		}
	}
	err = errors.Join(err, l.Close())
	return d.figure(time.Since(begin), processTime()-used), err
}

// figure counts pieces.
func (d *diskLoad) figure(took, used time.Duration) diskFigure {
	return figureOf(int(d.bytes/loadPiece), took, used, took)
}

// mapAndCopy is how a program loads weights that knows nothing better.
func (d *diskLoad) mapAndCopy() (diskFigure, error) {
	begin, used := time.Now(), processTime()
	memory := d.memory.Bytes()
	for _, path := range d.paths {
		n, err := copyMapped(memory, path)
		if err != nil {
			return diskFigure{}, err
		}
		memory = memory[n:]
	}
	return d.figure(time.Since(begin), processTime()-used), nil
}

func copyMapped(to []byte, path string) (n int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return 0, os.NewSyscallError("mmap", err)
	}
	n = copy(to, b[info.Size()%loadTensor:]) // without the header
	return n, unix.Munmap(b)
}

// fio reads the same files, one after the other, in pieces of the same size.
func (d *diskLoad) fio(ctx context.Context) (diskFigure, error) {
	tool, err := exec.LookPath(FioName)
	if err != nil {
		return diskFigure{}, fmt.Errorf("%s is not installed: apt-get install fio", FioName)
	}
	out, err := exec.CommandContext(ctx, tool, "--name=beside", "--filename="+strings.Join(d.paths,
		":"), "--rw=read",
		fmt.Sprint("--bs=", loadPiece), fmt.Sprint("--iodepth=", loadDepth),
		fmt.Sprint("--size=", d.bytes), "--file_service_type=sequential",
		"--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--readonly",
		"--output-format=json").Output()
	if err != nil {
		return diskFigure{}, fmt.Errorf("%s: %w: %.200s", FioName, err, out)
	}
	return parseFio(out, &Shape{Op: driver.Read})
}

func (d *diskLoad) sum(ways []diskWay, figures [][]diskFigure, notes []string, rounds int) Result {
	own := medianOf(figures[0])
	r := Result{Backend: "weights", Op: "load", Size: loadPiece, Batch: loadDepth, Threads: 1,
		Rounds: rounds, Memory: "host",
		GBps: own.rate * loadPiece / 1e9, OpsPerS: own.rate, P50us: Micros(own.p50),
		P99us: Micros(own.p99), Notes: notes,
		Route: "package weights", Extra: map[string]float64{"cpu-us": Micros(own.cpu)}}
	var beside []Baseline
	for i := 1; i < len(ways); i++ {
		if len(figures[i]) > 0 {
			f := medianOf(figures[i])
			beside = append(beside, Baseline{Name: ways[i].name, GBps: f.rate * loadPiece / 1e9,
				P50us: Micros(f.p50)})
			r.Extra[ways[i].name+"-cpu-us"] = Micros(f.cpu)
		}
	}
	r.SetBaselines(beside)
	return r
}

func (d *diskLoad) close() error {
	var errs []error
	for _, f := range d.files {
		errs = append(errs, f.Close())
	}
	if d.memory != nil {
		errs = append(errs, d.memory.Close())
	}
	for _, path := range d.paths {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}
