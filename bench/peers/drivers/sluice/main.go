// SPDX-License-Identifier: Apache-2.0

// Sluice is the driver of our own engine: its argument is a way to move bytes. See
// package peers.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/bench/peers"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// way is how bytes are moved.
type way struct {
	lane    string
	open    func() (driver.Backend, error)
	foreign bool // memory that the engine did not allocate
	// a receiver sleeps: one that looks for its message takes the processor from the sender
	parked   bool
	settings string
}

// near and far are what UCX may use on each lane.
const (
	nearTransports = "posix,sysv,cma,self"
	farTransports  = "tcp"
)

var ways = map[string]way{
	"shm": {lane: "host", open: func() (driver.Backend, error) {
		return shm.New(shm.Config{})
	}, settings: "backend shm, memory of Engine.Alloc"},
	"foreign": {lane: "host", open: func() (driver.Backend, error) {
		return shm.New(shm.Config{})
	}, foreign: true, settings: "backend shm, memory that the engine did not allocate"},
	"ucx": {lane: "host", open: func() (driver.Backend, error) {
		return ucx.New(ucx.Config{Transports: nearTransports})
	},
		settings: "backend ucx over " + nearTransports + ", memory of Engine.Alloc"},
	"tcp": {lane: "tcp", open: func() (driver.Backend, error) {
		return tcp.New(tcp.Config{Listen: "127.0.0.1:0", Plaintext: true})
	}, parked: true, settings: "backend tcp, plain text"},
	"ucx-tcp": {lane: "tcp", open: func() (driver.Backend, error) {
		return ucx.New(ucx.Config{Transports: farTransports, Devices: "lo"})
	}, parked: true, settings: "backend ucx over tcp"},
	"rdma": {lane: "rdma", open: func() (driver.Backend, error) { return rdma.New(rdma.Config{}) },
		settings: "backend rdma, memory of Engine.Alloc"},
}

func main() {
	if err := drive(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "drivers/sluice:", err)
		os.Exit(1)
	}
}

func drive(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, a way to move bytes")
	}
	if args[0] == "posix" {
		e := &fileEnd{}
		defer e.close()
		return peers.Serve(e)
	}
	w, ok := ways[args[0]]
	if !ok {
		return fmt.Errorf("no way %q to move bytes", args[0])
	}
	e := &end{way: w}
	defer e.close()
	return peers.Serve(e)
}

// end is one engine with one region.
type end struct {
	way    way
	eng    *engine.Engine
	memory []byte
	region *engine.Region
	whole  driver.Segment
	free   func() error
	more   []*engine.Region
	peer   *engine.Peer
	remote *engine.Remote
}

// card is what the other end needs.
type card struct {
	Description []byte `json:"description"`
}

const regionName = "kv"

// Limits of the drivers, where the harness has shorter ones of its own.
const patience = 60 * time.Second

// Open implements peers.End.
func (e *end) Open(r *peers.Request) (peers.Answer, error) {
	if r.Lane != e.way.lane {
		return peers.Answer{}, fmt.Errorf("it is for lane %s: %w", e.way.lane, peers.ErrUnsupported)
	}
	b, err := e.way.open()
	if err != nil {
		return peers.Answer{}, err
	}
	e.eng, err = engine.Open(engine.Config{Name: r.Name, Backends: []driver.Backend{b},
		ConnectTimeout: patience})
	if err != nil {
		return peers.Answer{}, err
	}
	if err := e.alloc(r.Bytes); err != nil {
		return peers.Answer{}, err
	}
	if e.region, err = e.eng.Register(regionName, e.whole); err != nil {
		return peers.Answer{}, err
	}
	a, err := e.described()
	waits := "messages looked for"
	if e.way.parked {
		waits = "messages slept for"
	}
	a.Version, a.Settings = "sluice", e.way.settings+", AddPages for scattered pieces and Add "+
		"for adjacent ones, made once, "+waits
	return a, err
}

func (e *end) alloc(bytes uint64) (err error) {
	if e.way.foreign {
		e.memory, err = unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return fmt.Errorf("map %d bytes: %w", bytes, err)
		}
		// as numpy has it, whose memory the drivers in Python use
		_ = unix.Madvise(e.memory, unix.MADV_HUGEPAGE)
		clear(e.memory) // faulted in
		e.free = func() error { return unix.Munmap(e.memory) }
		e.whole = engine.HostSegment(e.memory)
		return nil
	}
	m, err := e.eng.Alloc(bytes, engine.AllocOptions{Purpose: "bench", Populate: true})
	if err != nil {
		return err
	}
	e.memory, e.free, e.whole = m.Bytes(), m.Close, m.Segment()
	return nil
}

func (e *end) described(regions ...*engine.Region) (peers.Answer, error) {
	begin := time.Now()
	d, err := e.eng.Describe(regions...)
	took := time.Since(begin)
	if err != nil {
		return peers.Answer{}, err
	}
	text, err := json.Marshal(card{d})
	return peers.Answer{Card: string(text), NS: int64(took), Bytes: uint64(len(d))}, err
}

// Memory implements peers.End.
func (e *end) Memory() []byte { return e.memory }

// Connect implements peers.End.
func (e *end) Connect(text string) error {
	var c card
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	if e.peer, err = e.eng.Connect(ctx, c.Description); err != nil {
		return err
	}
	e.remote, err = e.peer.Remote(regionName)
	return err
}

// Regions implements peers.End.
func (e *end) Regions(count int, size uint64) (peers.Answer, error) {
	begin := time.Now()
	for i := range count {
		part, err := e.whole.Slice(uint64(i)*size, size, [16]byte{})
		if err != nil {
			return peers.Answer{}, err
		}
		region, err := e.eng.Register(fmt.Sprintf("kv.%05d", i), part)
		if err != nil {
			return peers.Answer{}, err
		}
		e.more = append(e.more, region)
	}
	took := time.Since(begin)
	a, err := e.described()
	a.PrepareNS = int64(took)
	return a, err
}

// Notify implements peers.End.
func (e *end) Notify(message []byte) error { return e.peer.Notify(context.Background(), message) }

// Receive implements peers.End.
func (e *end) Receive() (bool, error) {
	if e.way.parked {
		note := <-e.eng.Notifications()
		return true, note.Err
	}
	var notes [1]engine.Notification
	if e.eng.Receive(notes[:]) == 0 {
		return false, nil
	}
	return true, notes[0].Err
}

// posting is a transfer.
type posting struct{ t *engine.Transfer }

// Post implements peers.Posting.
func (p posting) Post(ctx context.Context) error {
	if err := p.t.Post(); err != nil {
		return err
	}
	return p.t.Wait(ctx)
}

// Close implements peers.Posting.
func (p posting) Close() error { return p.t.Close() }

// Prepare implements peers.End.
func (e *end) Prepare(op string, size uint64, local, remote []int32) (peers.Posting, error) {
	return prepare(e.eng, e.peer, places{e.region, e.remote}, op, size, local, remote)
}

// places are where pieces lie.
type places struct {
	region *engine.Region
	remote *engine.Remote
}

func prepare(eng *engine.Engine, peer *engine.Peer, where places, op string, size uint64, local,
	remote []int32) (peers.Posting, error) {
	kind := engine.Write
	if op == "read" {
		kind = engine.Read
	}
	t, err := eng.NewTransfer(peer, kind, engine.Route{})
	if err != nil {
		return nil, err
	}
	if err := where.list(t, size, local, remote); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return posting{t}, nil
}

// list adds the pieces: adjacent ones so that the engine may merge them, others as one pattern.
func (p *places) list(t *engine.Transfer, size uint64, local, remote []int32) error {
	if !adjacent(local) || !adjacent(remote) {
		return t.AddPages(p.region, p.remote, engine.Pages{Count: len(local), EntryLen: size,
			LocalStride: size, RemoteStride: size, Local: unsigned(local),
			Remote: unsigned(remote)})
	}
	for i := range local {
		if err := t.Add(p.region, uint64(local[i])*size, p.remote, uint64(remote[i])*size,
			size); err != nil {
			return err
		}
	}
	return nil
}

func adjacent(slots []int32) bool {
	for i, s := range slots {
		if s != slots[0]+int32(i) {
			return false
		}
	}
	return true
}

func unsigned(slots []int32) []uint32 {
	list := make([]uint32, len(slots))
	for i, s := range slots {
		list[i] = uint32(s)
	}
	return list
}

func (e *end) close() {
	if e.eng == nil {
		return
	}
	e.eng.Close()
	if e.free != nil {
		e.free()
	}
}
