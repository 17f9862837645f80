// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// driver is the stand-in of libcuda, nil on a machine with a card: SLUICE_LIBCUDA names its
// library.
var libcuda *standin.Library

func libraryPath() string {
	if libcuda != nil {
		return libcuda.Path
	}
	return os.Getenv("SLUICE_LIBCUDA")
}

func TestMain(m *testing.M) {
	if address := os.Getenv(knockVariable); address != "" {
		// before it needs a libcuda, which another user may not open
		if err := knock(address); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv("SLUICE_LIBCUDA") == "" {
		if err := openDriver(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if libcuda == nil {
		held = holdCard()
	}
	if os.Getenv(ownerVariable) != "" {
		if err := serveOwner(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	drivertest.Main(m, upHarness, downHarness, withinHarness, betweenHarness, betweenUpHarness)
}

// held is memory of a card that stays until the process ends.
var held io.Closer

// holdCard has a real driver open, before a check counts descriptors, what it keeps open as long as
// the process lives or a context of it does. The context stays, as in a program that uses PyTorch.
// Without a card it returns nil, and the tests say why themselves.
func holdCard() io.Closer {
	b, err := New(peersConfig())
	if err != nil {
		return nil
	}
	defer b.Close()
	_, owner, err := b.AllocDevice(0, 1<<20)
	if err != nil {
		return nil
	}
	return owner
}

// flagsVariable names flags for the build of the stand-in, to a test that runs alone.
const flagsVariable = "SLUICE_STANDIN_FLAGS"

// builtVariable names the stand-in that the parent of this process has built.
const builtVariable = "SLUICE_STANDIN_BUILT"

func openDriver() (err error) {
	_, other := os.LookupEnv(flagsVariable)
	if path := os.Getenv(builtVariable); path != "" && !other {
		libcuda = &standin.Library{Path: path}
		return errors.Join(os.Unsetenv("STANDIN_PANEL"), gpu.Load(path))
	}
	if libcuda, err = standin.BuildCUDA(strings.Fields(os.Getenv(flagsVariable))...); err != nil {
		return err
	}
	defer libcuda.Remove()
	if err := errors.Join(os.Setenv("STANDIN_PANEL", libcuda.Panel), os.Setenv("STANDIN_DEVICES",
		"2")); err != nil {
		return err
	}
	// for other processes, as long as this one lives
	built, err := unix.Open(libcuda.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := os.Setenv(builtVariable, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(),
		built)); err != nil {
		return err
	}
	return gpu.Load(libcuda.Path) // and then the file may go
}

// harness is small limits and the kernel.
func harness(name string, local, remote drivertest.Allocator,
	w drivertest.Wiring) drivertest.Harness {
	return drivertest.Harness{
		Name: name, Local: local, Remote: remote, Wirings: w, Grace: 200 * time.Millisecond,
		New: func() (driver.Backend, error) {
			b, err := New(testConfig())
			if err != nil {
				return nil, err
			}
			return b, nil
		},
	}
}

func testConfig() Config {
	return Config{Library: libraryPath(), BatchesMax: 256, Budget: cuda.Budget{SMs: 2}}
}

var (
	upHarness     = harness("up", nil, hbm, 0)
	downHarness   = harness("down", hbm, nil, drivertest.Self)
	withinHarness = harness("within", hbm, hbm, drivertest.Pair)
)

// Between processes, with memory that AllocDevice makes.
var (
	betweenHarness   = between("between", hbm, drivertest.Processes)
	betweenUpHarness = between("between-up", nil, 0, "Lengths", "Patterns", "Revoke",
		"RevokeFrozen", "RevokeUnderWrites")
)

func between(name string, local drivertest.Allocator, w drivertest.Wiring,
	only ...string) drivertest.Harness {
	h := harness(name, local, sharedHBM, w)
	h.Only = only
	h.Park = func(name string, f func()) { testpoint.First("cuda: "+name, f) }
	h.Spots = []string{"announced", "good", "shown", "launched", "ended", "judged"}
	h.New = func() (driver.Backend, error) {
		b, err := New(peersConfig())
		if err != nil {
			return nil, err
		}
		return b, nil
	}
	return h
}

func peersConfig() Config {
	cfg := testConfig()
	cfg.Peers = true
	return cfg
}

func TestHBMBetweenProcesses(t *testing.T)       { drivertest.Run(t, betweenHarness) }
func TestDRAMToHBMBetweenProcesses(t *testing.T) { drivertest.Run(t, betweenUpHarness) }

func TestDRAMToHBM(t *testing.T) { drivertest.Run(t, upHarness) }
func TestHBMToDRAM(t *testing.T) { drivertest.Run(t, moving(downHarness)) }
func TestHBMToHBM(t *testing.T)  { drivertest.Run(t, moving(withinHarness)) }

// moving is a harness whose memory alone is another than that of upHarness.
func moving(h drivertest.Harness) drivertest.Harness {
	h.Only = drivertest.Moving
	return h
}

func TestSoakHBMToDRAM(t *testing.T) { drivertest.Run(t, downHarness) }
func TestSoakHBMToHBM(t *testing.T)  { drivertest.Run(t, withinHarness) }

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
	if err := gpu.Load(libraryPath()); err != nil {
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

// sharedHBM is memory of the first device as AllocDevice makes it for other processes.
func sharedHBM(n uint64) (*drivertest.Space, error) {
	d, err := openCard(0)
	if err != nil {
		return nil, err
	}
	if _, err := gpu.Devices(); err != nil { // loads what blocks need
		return nil, err
	}
	o, err := newOwnBlock(0, n, true)
	if err != nil {
		return nil, err
	}
	seg := driver.Segment{Kind: driver.HBM, Len: n, Addr: o.block.At}
	s := &drivertest.Space{Segment: seg, Bytes: drivertest.CardBytes{Card: d, At: seg.Addr, Len: n},
		Free: o.Close}
	_, err = s.Bytes.WriteAt(make([]byte, n), 0)
	return s, err
}

func parkAt(name string, f func()) { testpoint.First("cuda: "+name, f) }
