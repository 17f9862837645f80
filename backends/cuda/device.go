// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
)

// device is a GPU with its streams.
type device struct {
	ordinal int
	uuid    [16]byte // names the device to other processes; set only with Config.Peers
	facts   gpu.Facts
	mover   *gpu.Mover
	kernels *cuda.Kernels // nil: no kernel may run
	sums    *cuda.Summer  // nil: noSums says why, or no kernel may run
	noSums  error
	loads   []atomic.Int32 // batches on each shared stream

	mu     sync.Mutex // guards what follows
	gated  []bool     // which gated workers are in use
	sides  []*side    // for sums, made when first needed
	places []*gpu.Place
	free   []*gpu.Place
}

func (b *Backend) openDevices() error {
	count, err := gpu.Devices()
	if err != nil {
		return err
	}
	ordinals := b.cfg.Devices
	if ordinals == nil {
		for i := range count {
			ordinals = append(ordinals, i)
		}
	}
	for _, o := range ordinals {
		if b.device(o) != nil {
			return fmt.Errorf("open cuda backend: Config.Devices names %d twice: %w", o,
				driver.ErrBounds)
		}
		d, err := b.openDevice(o)
		if err != nil {
			return err
		}
		b.devices = append(b.devices, d)
	}
	if len(b.devices) == 0 {
		return fmt.Errorf("open cuda backend: Config.Devices is empty: leave it nil for all: %w",
			driver.ErrBounds)
	}
	return nil
}

func (b *Backend) openDevice(ordinal int) (*device, error) {
	one, err := gpu.Open(ordinal)
	if err != nil {
		return nil, err
	}
	d := &device{ordinal: ordinal, facts: one.Facts(), loads: make([]atomic.Int32, b.cfg.Streams),
		gated: make([]bool, b.cfg.Gated)}
	if err := one.Close(); err != nil {
		return nil, err
	}
	if b.cfg.Peers {
		if d.uuid, err = gpu.UUID(ordinal); errors.Is(err, driver.ErrNotSupported) {
			return nil, &driver.UnavailableError{Backend: "cuda",
				Reason: "Config.Peers: the driver does not name devices",
				Fix:    "CUDA 11.4 or later, or leave Config.Peers off"}
		} else if err != nil {
			return nil, err
		}
	}
	if d.mover, err = gpu.OpenMover(ordinal, b.ends, b.cfg.BatchesMax, b.cfg.Streams,
		b.cfg.Gated); err != nil {
		return nil, err
	}
	if b.cfg.kernels() {
		card := cuda.Card{Compute: d.facts.Compute, Driver: d.facts.Driver, SMs: d.facts.SMs,
			Shared: d.facts.Shared}
		if d.kernels, err = cuda.LoadKernels(card, d.mover.Load); err != nil {
			d.mover.Close()
			return nil, err
		}
		// Do it now: while a program captures a graph, the CUDA driver refuses such calls.
		d.sums, d.noSums = cuda.OpenSummer(b.cfg.Library, ordinal, b.cfg.Budget)
	}
	return d, nil
}

// close releases the device. Nothing runs on it.
func (d *device) close() {
	for _, p := range d.places {
		d.mover.Displace(*p)
	}
	for _, s := range d.sides {
		_ = s.Close() // after its events
	}
	if d.sums != nil {
		_ = d.sums.Close() // the context goes with the last of its users
	}
	d.mover.Close()
}

// device finds a device by its ordinal; nil: Config.Devices leaves it out.
func (b *Backend) device(ordinal int) *device {
	for _, d := range b.devices {
		if d.ordinal == ordinal {
			return d
		}
	}
	return nil
}

// worker returns the shared stream with the fewest batches, so that a short batch does not queue
// behind a long one while another stream is free.
func (d *device) worker() int {
	best := 0
	for i := range d.loads {
		if d.loads[i].Load() < d.loads[best].Load() {
			best = i
		}
	}
	d.loads[best].Add(1)
	return best
}

// gatedWorker takes a stream that no other batch uses, or returns driver.ErrFull. A batch whose
// event is late must not hold up others, above all not those on which the event itself depends.
func (d *device) gatedWorker() (number, worker int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, taken := range d.gated {
		if taken {
			continue
		}
		worker, err := d.mover.GatedWorker(i)
		if err != nil {
			return 0, 0, err
		}
		d.gated[i] = true
		return i, worker, nil
	}
	return 0, 0, driver.ErrFull
}

func (d *device) ungate(number int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gated[number] = false
}

// placeBytes is the size of a tally and two lists of indices.
const placeBytes = tallyRoom + 2*4*runsMax

// place takes memory for indices, which it allocates when first needed. driver.ErrFull: all places
// are in use.
func (d *device) place() (*gpu.Place, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.free); n > 0 {
		p := d.free[n-1]
		d.free = d.free[:n-1]
		return p, nil
	}
	if len(d.places) == placesCount {
		return nil, driver.ErrFull
	}
	p, err := d.mover.Place(placeBytes)
	if err != nil {
		return nil, err
	}
	d.places = append(d.places, &p)
	return &p, nil
}

func (d *device) unplace(p *gpu.Place) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free = append(d.free, p)
}

func (d *device) String() string {
	return fmt.Sprintf("device %d, %s at %s", d.ordinal, d.facts.Name, d.facts.Bus)
}
