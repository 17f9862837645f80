// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package gds

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// The stand-ins of libcuda and libcufile; nil on a machine with a card, where SLUICE_LIBCUDA and
// SLUICE_LIBCUFILE name the libraries.
var (
	libcuda *standin.Library
	library *standin.Library
)

// flagsVariable names flags for the build of libcufile's stand-in, to a test that runs alone;
// bareVariable has nothing opened before the test.
const (
	flagsVariable = "SLUICE_STANDIN_FLAGS"
	bareVariable  = "SLUICE_STANDIN_BARE"
	// the stand-in of libcuda that the parent of this process has built
	builtVariable = "SLUICE_STANDIN_BUILT"
)

func TestMain(m *testing.M) {
	if os.Getenv("SLUICE_LIBCUDA") == "" {
		if err := openLibraries(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	} else {
		held = holdCard()
	}
	drivertest.Main(m)
}

// held is memory of a card that stays until the process ends.
var held *drivertest.Space

// holdCard has the real libraries open, before a check counts descriptors, what they keep open as
// long as the process lives or a context of it does. Without a card the tests say why themselves.
func holdCard() *drivertest.Space {
	if _, err := Examine(testConfig()); err != nil {
		return nil
	}
	space, err := hbm(1 << 20)
	if err != nil {
		return nil
	}
	return space
}

func openLibraries() (err error) {
	if path := os.Getenv(builtVariable); path != "" {
		libcuda = &standin.Library{Path: path}
	} else if libcuda, err = buildDriver(); err != nil {
		return err
	}
	if library, err = standin.BuildCuFile(strings.Fields(os.Getenv(flagsVariable))...); err != nil {
		return err
	}
	err = errors.Join(os.Setenv("STANDIN_DEVICES", "2"),
		os.Setenv("STANDIN_LIBCUDA", libcuda.Path), os.Setenv("STANDIN_CUFILE_PANEL",
			library.Panel))
	if err != nil || os.Getenv(bareVariable) != "" {
		return err
	}
	defer libcuda.Remove()
	defer library.Remove()
	_, err = Examine(testConfig())
	return err
}

// buildDriver keeps what it built open, for other processes, as long as this one lives.
func buildDriver() (*standin.Library, error) {
	d, err := standin.BuildCUDA()
	if err != nil {
		return nil, err
	}
	built, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return d, os.Setenv(builtVariable, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), built))
}

// testConfig names the libraries.
func testConfig() Config {
	if libcuda == nil {
		return Config{CUDA: os.Getenv("SLUICE_LIBCUDA"), Library: os.Getenv("SLUICE_LIBCUFILE")}
	}
	return Config{CUDA: libcuda.Path, Library: library.Path}
}

// onStandIn skips what commands the stand-ins.
func onStandIn(tb testing.TB) {
	tb.Helper()
	if library == nil {
		drivertest.SkipIfUnavailable(tb, &driver.UnavailableError{Backend: "gds",
			Reason: "this test commands the stand-in of libcufile",
			Fix:    "run it without SLUICE_LIBCUDA"})
	}
}

// tmpfs is a directory in memory.
const tmpfs = "/dev/shm"

// onDisk is the directory, or with NVIDIA's libcufile one on a disk: that takes no file in memory.
func onDisk(dir string) string {
	if library == nil {
		return os.TempDir()
	}
	return dir
}

// variants are ways of the backend, each over a file in which memory lies off bytes behind whole
// blocks.
var variants = []struct {
	name string
	cfg  Config
	dir  string
	off  uint64
	all  bool // checks, and not those of drivertest.Moving alone
}{
	{"batches", Config{Way: WayBatch}, os.TempDir(), 0, true},
	{"batches-odd", Config{Way: WayBatch, Depth: 5, Threads: 2, BatchMax: 3, PieceMax: 64 << 10,
		JobsMax: 9}, os.TempDir(), 777, false},
	{"threads", Config{Way: WayThreads}, tmpfs, 0, false},
	{"threads-odd", Config{Way: WayThreads, Threads: 2, Depth: 5, BufferMax: 1 << 20}, tmpfs, 777,
		false},
}

func TestBackend(t *testing.T) {
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			cfg := v.cfg
			cfg.CUDA, cfg.Library = testConfig().CUDA, testConfig().Library
			h := drivertest.Harness{
				Name: v.name, Local: hbm, Remote: drivertest.FileMemory(onDisk(v.dir), v.off),
				SelfOnly: true,
				New: func() (driver.Backend, error) {
					b, err := New(cfg)
					if err != nil {
						return nil, err
					}
					return b, nil
				},
			}
			if !v.all {
				h.Only = drivertest.Moving
			}
			drivertest.Run(t, h)
			nothingInUse(t)
		})
	}
}

// nothingInUse wants all given back to the stand-ins.
func nothingInUse(t *testing.T) {
	t.Helper()
	if library == nil {
		return
	}
	if n := library.InUse(); len(n) > 0 {
		t.Errorf("left in the library: %v", n)
	}
	if n := library.Get("changed_blocks"); n > 0 {
		t.Errorf("%d writes of other than whole blocks were left to cuFile", n)
	}
}

// card is the test's own way to memory of devices, which is not the backend's.
var card struct {
	sync.Mutex
	open map[int]*gpu.Device
}

func openCard(ordinal int) (*gpu.Device, error) {
	card.Lock()
	defer card.Unlock()
	if d := card.open[ordinal]; d != nil {
		return d, nil
	}
	if err := gpu.Load(testConfig().CUDA); err != nil {
		return nil, err
	}
	d, err := gpu.Open(ordinal)
	if err != nil {
		return nil, err
	}
	if card.open == nil {
		card.open = map[int]*gpu.Device{}
	}
	card.open[ordinal] = d
	return d, nil
}

// hbm makes memory of the first device.
func hbm(n uint64) (*drivertest.Space, error) { return hbmOn(0, n) }

func hbmOn(ordinal int, n uint64) (*drivertest.Space, error) {
	d, err := openCard(ordinal)
	if err != nil {
		return nil, err
	}
	return drivertest.HBM(d, ordinal, n)
}
