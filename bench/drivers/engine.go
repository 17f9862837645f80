// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/cuda"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/bench"
	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// engineEnd is our own engine. Between two processes each end has one region. On the other lanes
// one process has both: on lane process two memories, on lane file a memory and the file that the
// target keeps, on lane gpu a card's memory and the host's, on lane gpufile a card's and a file.
type engineEnd struct {
	base
	specs   []string // backends, as --backend takes them
	foreign bool     // the memory is none that the engine allocated
	only    string   // engine.Route.Only
	folder  string   // of the file of lane gpufile
	file    *os.File // the same
	lane    bench.Lane

	near, far []byte
	whole     driver.Segment // of near
	route
	pieces *route // of lane file: for pieces that are no whole blocks
	card   *gpu.Device
	owned  []func() error // to be closed from the last on
}

// route is an engine with a region, and the region at the other end.
type route struct {
	eng      *engine.Engine
	backends []driver.Backend
	region   *engine.Region
	peer     *engine.Peer
	remote   *engine.Remote
}

const (
	nearName = "near"
	farName  = "far"
	// limit of what the harness bounds itself, by less
	patience = 60 * time.Second
)

// newEngine takes backends and these words: foreign, only=BACKEND, and for lane gpufile the folder
// dir=DIR.
func newEngine(args []string) (end, error) {
	e := &engineEnd{}
	for _, word := range args {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "foreign":
			e.foreign = true
		case "only":
			e.only = value
		case "dir":
			e.folder = value
		default:
			e.specs = append(e.specs, word)
		}
	}
	if len(e.specs) == 0 {
		return nil, errors.New("want a backend")
	}
	for _, spec := range e.specs {
		if name, _, _ := strings.Cut(spec, ":"); name == "cuda" {
			return &cardEnd{engineEnd: e}, nil
		}
	}
	return e, nil
}

// Open implements bench.End.
func (e *engineEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	e.lane = bench.Lane(r.Lane)
	for i, spec := range e.specs {
		e.specs[i] = copying(spec, r.Threads)
	}
	if err := e.route.open(r.Name, e.specs); err != nil {
		return a, err
	}
	memory, err := e.alloc(r.Bytes)
	if err != nil {
		return a, err
	}
	if e.region, err = e.eng.Register(nearName, e.whole); err != nil {
		return a, err
	}
	a.Version, a.Settings = "sluice", "backend "+strings.Join(e.specs, " and ")+", "+memory
	switch e.lane {
	case bench.Process, bench.GPU:
		m, err := engine.Alloc(r.FarBytes, engine.AllocOptions{Purpose: "bench", Populate: true})
		if err != nil {
			return a, err
		}
		e.owned, e.far = append(e.owned, m.Close), m.Bytes()
		return a, e.self(m.Segment())
	case bench.GPUFile:
		return a, e.openFile(r.FarBytes)
	case bench.File:
		e.pieces = &route{}
		name, options, _ := strings.Cut(e.specs[0], ":")
		buffered := strings.TrimSuffix(name+":buffered=true,"+options, ",")
		if err := e.pieces.open(r.Name, []string{buffered}); err != nil {
			return a, err
		}
		a.Settings += "; for pieces that are no whole blocks one with Buffered"
		e.pieces.region, err = e.pieces.eng.Register(nearName, e.whole)
		return a, err
	}
	card, err := e.described()
	waits := "messages by polling"
	if e.sleeps() {
		waits = "messages by sleeping"
	}
	card.Version, card.Settings = a.Version, a.Settings+", AddPages for scattered pieces and Add "+
		"for adjacent ones, made once, "+waits
	return card, err
}

// copying has a backend that copies itself do so by as many threads as what stands beside it,
// unless its options say workers=; 0: by its own choice.
func copying(spec string, threads int) string {
	name, words, found := strings.Cut(spec, ":")
	if threads <= 0 || name != "shm" && name != "mem" {
		return spec
	}
	if spec = fmt.Sprintf("%s:workers=%d", name, threads); found {
		spec += "," + words
	}
	return spec
}

func (r *route) open(name string, specs []string) (err error) {
	for _, spec := range specs {
		name, words, err := byname.Split(spec)
		var b driver.Backend
		if err == nil {
			b, err = byname.Open(name, words)
		}
		if err != nil {
			return err // which ends the process, and the backends with it
		}
		r.backends = append(r.backends, b)
	}
	r.eng, err = engine.Open(engine.Config{Name: name, Backends: r.backends,
		ConnectTimeout: patience, Plaintext: true})
	return err
}

// self has an engine be its own peer, with another region there.
func (r *route) self(far driver.Segment) (err error) {
	if _, err = r.eng.Register(farName, far); err != nil {
		return err
	}
	if r.peer, err = r.eng.Self(); err != nil {
		return err
	}
	r.remote, err = r.peer.Remote(farName)
	return err
}

// alloc makes the memory, and says what it is.
func (e *engineEnd) alloc(bytes uint64) (what string, err error) {
	if e.foreign {
		e.near, err = unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return "", fmt.Errorf("map %d bytes: %w", bytes, err)
		}
		// as numpy has it, whose memory the drivers in Python use
		_ = unix.Madvise(e.near, unix.MADV_HUGEPAGE)
		clear(e.near) // faulted in
		e.owned = append(e.owned, func() error { return unix.Munmap(e.near) })
		e.whole = engine.HostSegment(e.near)
		return "memory that the engine did not allocate", nil
	}
	for _, b := range e.backends {
		if b, ok := b.(*cuda.Backend); ok {
			return e.allocOnCard(b, bytes)
		}
	}
	m, err := e.eng.Alloc(bytes, engine.AllocOptions{Purpose: "bench", Populate: true})
	if err != nil {
		return "", err
	}
	e.owned, e.near, e.whole = append(e.owned, m.Close), m.Bytes(), m.Segment()
	return "memory of Engine.Alloc", nil
}

// allocOnCard takes memory of the first card.
func (e *engineEnd) allocOnCard(b *cuda.Backend, bytes uint64) (what string, err error) {
	var memory io.Closer
	if e.whole, memory, err = b.AllocDevice(0, bytes); err != nil {
		return "", err
	}
	e.owned = append(e.owned, memory.Close)
	if e.card, err = gpu.Open(0); err != nil {
		return "", err
	}
	e.owned = append(e.owned, e.card.Close)
	return "memory of " + e.card.Facts().Name, nil
}

// openFile makes the file of lane gpufile, which has no name: its bytes are seen by a mapping.
func (e *engineEnd) openFile(bytes uint64) error {
	f, err := os.CreateTemp(e.folder, "bench-*")
	if err != nil {
		return err
	}
	e.file, e.owned = f, append(e.owned, f.Close)
	if err := errors.Join(os.Remove(f.Name()), unix.Fallocate(int(f.Fd()), 0, 0,
		int64(bytes))); err != nil {
		return fmt.Errorf("make a file of %d bytes: %w", bytes, err)
	}
	e.far, err = unix.Mmap(int(f.Fd()), 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	e.owned = append(e.owned, func() error { return unix.Munmap(e.far) })
	return e.route.selfFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

// writeBack leaves nothing of the file of lane gpufile in the page cache.
func (e *engineEnd) writeBack() error {
	fd := int(e.file.Fd())
	return errors.Join(os.NewSyscallError("fdatasync", unix.Fdatasync(fd)),
		os.NewSyscallError("madvise", unix.Madvise(e.far, unix.MADV_DONTNEED)),
		os.NewSyscallError("fadvise", unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)))
}

// selfFile has the region at the other end be a file.
func (r *route) selfFile(path string) error {
	f, err := posix.Open(path, posix.OpenOptions{})
	if err != nil {
		return err
	}
	return errors.Join(r.self(f.Segment()), f.Close())
}

// sleeps reports whether a receiver sleeps: one that looks for its message takes the processor from
// the sender, where bytes go through the kernel.
func (e *engineEnd) sleeps() bool { return e.lane == bench.TCP }

func (e *engineEnd) described() (bench.Answer, error) {
	begin := time.Now()
	d, err := e.eng.Describe()
	return bench.Answer{Card: base64.StdEncoding.EncodeToString(d), NS: int64(time.Since(begin)),
		Bytes: uint64(len(d))}, err
}

// Memory implements bench.End.
func (e *engineEnd) Memory() []byte { return e.near }

// Far implements bench.Alone.
func (e *engineEnd) Far() []byte { return e.far }

// Connect implements bench.End.
func (e *engineEnd) Connect(card string) error {
	if e.lane == bench.File {
		c, err := readFileCard(card)
		if err != nil {
			return err
		}
		return errors.Join(e.route.selfFile(c.Path), e.pieces.selfFile(c.Path))
	}
	description, err := base64.StdEncoding.DecodeString(card)
	if err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if e.peer, err = e.eng.Connect(ctx, description); err != nil {
		return err
	}
	e.remote, err = e.peer.Remote(nearName)
	return err
}

// Notify implements bench.End.
func (e *engineEnd) Notify(message []byte) error {
	if e.peer == nil || e.pieces != nil {
		return noPeer()
	}
	return e.peer.Notify(context.Background(), message)
}

// Receive implements bench.End.
func (e *engineEnd) Receive() (bool, error) {
	if e.sleeps() {
		note := <-e.eng.Notifications()
		return true, note.Err
	}
	var notes [1]engine.Notification
	if e.eng.Receive(notes[:]) == 0 {
		return false, nil
	}
	return true, notes[0].Err
}

// transfer is a Posting.
type transfer struct{ *engine.Transfer }

// Post implements bench.Posting.
func (p transfer) Post(ctx context.Context) error {
	if err := p.Transfer.Post(); err != nil {
		return err
	}
	return p.Wait(ctx)
}

// wholeBlock is the block size in bytes: pieces of whole blocks bypass the page cache.
const wholeBlock = 4 << 10

// Prepare implements bench.End. Adjacent pieces are added one by one, so that the engine may merge
// them, others as one pattern.
func (e *engineEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting, error) {
	by, kind := &e.route, engine.Write
	if op == bench.OpRead {
		kind = engine.Read
	}
	if e.pieces != nil && size%wholeBlock != 0 {
		by = e.pieces
	}
	if e.file != nil {
		if err := e.writeBack(); err != nil {
			return nil, err
		}
	}
	t, err := by.eng.NewTransfer(by.peer, kind, engine.Route{Only: e.only,
		Durable: op == bench.OpDurable})
	if err != nil {
		return nil, err
	}
	if !adjacent(local) || !adjacent(remote) {
		err = t.AddPages(by.region, by.remote, engine.Pages{Count: len(local), EntryLen: size,
			LocalStride: size, RemoteStride: size, Local: unsigned(local),
			Remote: unsigned(remote)})
	} else {
		for i := range local {
			err = errors.Join(err, t.Add(by.region, uint64(local[i])*size, by.remote,
				uint64(remote[i])*size, size))
		}
	}
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return transfer{t}, nil
}

func (e *engineEnd) close() {
	for _, r := range []*route{e.pieces, &e.route} {
		if r != nil && r.eng != nil {
			r.eng.Close()
		}
	}
	for _, free := range slices.Backward(e.owned) {
		_ = free()
	}
}

// cardEnd is an engineEnd whose memory is on a card.
type cardEnd struct{ *engineEnd }

// ReadAt implements bench.Keeper.
func (e *cardEnd) ReadAt(b []byte, off int64) (int, error) {
	return len(b), e.card.Read(b, e.whole.Addr+uint64(off))
}

// WriteAt implements bench.Keeper.
func (e *cardEnd) WriteAt(b []byte, off int64) (int, error) {
	return len(b), e.card.Write(e.whole.Addr+uint64(off), b)
}

// Cache implements bench.Keeper.
func (e *cardEnd) Cache(bool) error { return noPeer() }
