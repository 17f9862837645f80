// SPDX-License-Identifier: Apache-2.0

// Package gds moves bytes between device memory and files of one process by NVIDIA's cuFile
// (GPUDirect Storage): a File segment is a region like any other, and with nvidia-fs, or PCI
// P2PDMA, the disk reads and writes the memory of the card itself. Where it cannot, cuFile works in
// its compat mode, by way of host memory, as the engine's chain does: Explain says which it is.
//
// The package is experimental: NVIDIA's libcufile has met it in compat mode alone, all else is
// tested over a software stand-in.
//
// libcufile is opened at run time, and only where libcuda has found a device. Files and memory are
// registered with it once. A batch becomes requests of bounded size (plan.go), a bounded table of
// which is with threads in C that hand them to cuFile as batches, on streams, or one by one
// (Config.Way). One mutex guards what is under way (serve.go); no byte is moved under it and no
// call into C is made.
//
// # Blocks
//
// Where a write is not aligned, cuFile reads whole blocks, changes and writes them, and undoes what
// others write there meanwhile. It is therefore given whole blocks alone: the edges of a write go
// by way of host memory and the page cache. Writes that share a block are never under way at once.
//
// # What proves that nothing lands later
//
// Only this process reaches a file, and nothing is with cuFile that is not in the table:
// Revoke, Cancel and Close start nothing more and wait for the end of what is under way, since
// cuFile cannot recall it. What has timed out in a batch has ended when the batch was cancelled and
// destroyed. A disk that does not answer holds them up.
package gds

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
	"github.com/sluicehq/sluice/internal/proc"
)

// Backend implements driver.Backend.
type Backend struct {
	driver.BackendBase
	cfg      Config
	facts    Facts
	caps     driver.Caps
	flights  ownfiles.Flights[extent] // Gate: the users of ends and mover
	event    *proc.Event              // for Arm; C signals it at the end of a request
	heed     *proc.Event              // for attend; C signals it while a caller heeds
	attended sync.WaitGroup
	ends     *gpu.Ends
	mover    *cufile.Mover

	// Guarded by flights.Mu, under which no call into C is made but in cold calls.
	heeding  bool // attend is told of ends
	files    map[ownfiles.ID]*file
	jobs     []job
	requests []request
	free     []*request
	landed   [reapMax]ring.Done
	out      *crossing // to be handed to the mover

	sparing sync.Mutex // after flights.Mu; guards what follows
	spare   []*crossing
}

// crossing is what crosses into C at a time.
type crossing struct{ list []cufile.Request }

// reapMax is how many ends are handled at a time.
const reapMax = 64

// can is what the peers take.
const can = driver.CanPattern

var _ driver.Backend = (*Backend)(nil)

// New opens libcuda and libcufile, and a backend. Where one is missing, or has no device, it
// answers a *driver.UnavailableError.
func New(cfg Config) (*Backend, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("gds: %w", err)
	}
	facts, err := Examine(cfg)
	if err != nil {
		return nil, err
	}
	if err := cfg.settle(&facts); err != nil {
		return nil, err
	}
	b := &Backend{cfg: cfg, facts: facts, files: map[ownfiles.ID]*file{}}
	b.caps = caps(&b.cfg, facts.Compat)
	b.flights.Open(ownfiles.Config[extent]{Name: "gds", Memory: "memory", Mover: "cuFile",
		KeysMax: cfg.KeysMax,
		JobsMax: cfg.JobsMax, Can: can, DescsMax: descsMax, RunsMax: runsMax, Room: b.room,
		Cut: b.begin, Ends: b.finish,
		Stop: b.stop, Leave: b.leave, Release: b.giveBack})
	b.makeTables()
	if err := b.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("gds: %w", err), b.release())
	}
	return b, nil
}

func (b *Backend) makeTables() {
	b.jobs = make([]job, b.cfg.JobsMax)
	for i := range b.jobs {
		j := &b.jobs[i]
		j.Slot = i
		b.flights.Add(&j.Job)
	}
	b.requests = make([]request, b.cfg.Depth)
	b.free = make([]*request, 0, b.cfg.Depth)
	for i := range b.requests {
		r := &b.requests[b.cfg.Depth-1-i]
		r.slot = uint32(b.cfg.Depth - 1 - i)
		b.free = append(b.free, r)
	}
	b.out = b.newCrossing()
}

func (b *Backend) open() (err error) {
	if b.event, err = proc.NewEvent(); err != nil {
		return err
	}
	if b.heed, err = proc.NewEvent(); err != nil {
		return err
	}
	slots := 1 << bits.Len(uint(b.cfg.Depth-1))
	if b.ends, err = gpu.NewEnds(slots, b.event.FD(), b.heed.FD()); err != nil {
		return err
	}
	way := map[Way]cufile.Way{WayBatch: cufile.Batch, WayStream: cufile.Stream,
		WayThreads: cufile.One}[b.cfg.Way]
	if b.mover, err = cufile.OpenMover(b.ends, slots, b.cfg.Threads, way,
		b.cfg.BatchMax); err != nil {
		return err
	}
	b.attended.Go(b.attend)
	return nil
}

// attend handles ends that cannot wait for Poll.
func (b *Backend) attend() {
	for b.heed.Wait() == nil {
		if !b.flights.Gate.Enter() {
			return
		}
		b.serve()
		b.flights.Gate.Exit()
	}
}

// Caps implements driver.Backend.
func (b *Backend) Caps() driver.Caps { return b.caps }

// Addr implements driver.Backend. It opens nothing in another process.
func (b *Backend) Addr() []byte { return b.flights.Addr() }

// Facts says what the library said of itself when the backend was opened.
func (b *Backend) Facts() Facts { return b.facts }

// Close implements driver.Backend. It waits for what the disks have in hand.
func (b *Backend) Close() error {
	return b.flights.Close(b.release)
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if b.mover != nil {
		b.mover.Close()
	}
	for _, e := range []*proc.Event{b.heed, b.event} {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	b.attended.Wait()
	if b.ends != nil {
		b.ends.Close()
	}
	return errors.Join(errs...)
}
