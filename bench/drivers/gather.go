// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// newGather takes cuda with options, as --backend takes them: library=PATH is libcuda, sms=N how
// many multiprocessors a kernel may take, variant=NAME one of async, rows and copy; without it the
// Device chooses. With sms=0 no kernel runs, and the engine has a processor gather.
func newGather(args []string) (end, error) {
	if len(args) != 1 {
		return nil, errors.New("want cuda")
	}
	name, words, err := byname.Split(args[0])
	if err == nil && name != "cuda" {
		err = fmt.Errorf("no device %q to gather by: want cuda", name)
	}
	e := &gatherEnd{gatherOptions: gatherOptions{SMs: 4}}
	if err == nil {
		err = byname.SetOptions(&e.gatherOptions, words)
	}
	if _, known := kernels[e.Variant]; err == nil && !known {
		err = fmt.Errorf("no variant %q: there are async, rows and copy", e.Variant)
	}
	if err == nil && e.SMs == 0 && e.Variant == "" {
		return newEngine(args)
	}
	e.budget.SMs = e.SMs
	return e, err
}

type gatherOptions struct {
	Library string
	SMs     int
	Variant string
}

// gatherEnd moves entries between a card's memory, which is the initiator's, and pinned memory of
// the host.
type gatherEnd struct {
	base
	gatherOptions
	budget cuda.Budget

	dev            *cuda.Device
	pool           *hostmem.Buffer
	pinned, onCard *cuda.Memory
	bytes          uint64 // on the card
}

// copyVariant is one large copy by the copy engine, which leaves the bytes of an operation in one
// run.
const copyVariant = "copy"

// kernels are those of the other variants.
var kernels = map[string]string{"": "", "async": cuda.KernelAsync, "rows": cuda.KernelRows,
	copyVariant: ""}

// Open implements bench.End.
func (e *gatherEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if err := onlyLane(r, bench.GPU); err != nil {
		return a, err
	}
	if e.dev, err = cuda.OpenDevice(cuda.DeviceOptions{Library: e.Library}); err != nil {
		return a, err
	}
	e.bytes = r.Bytes
	if e.onCard, err = e.dev.Alloc(e.bytes); err != nil {
		return a, err
	}
	if e.pool, err = hostmem.Alloc(r.FarBytes, hostmem.Options{Purpose: "bench",
		Populate: true}); err != nil {
		return a, err
	}
	if e.pinned, err = e.dev.Pin(e.pool.Bytes()); err != nil {
		return a, err
	}
	how := e.Variant
	if how == "" {
		how = "the variant that is planned to be fastest"
	}
	return bench.Answer{Version: e.dev.Name(), Settings: fmt.Sprintf("%s, %d multiprocessors", how,
		e.budget.SMs)}, nil
}

// Far implements bench.Alone.
func (e *gatherEnd) Far() []byte { return e.pool.Bytes() }

// ReadAt implements bench.Keeper.
func (e *gatherEnd) ReadAt(b []byte, off int64) (int, error) {
	return len(b), e.onCard.ReadAt(b, uint64(off))
}

// WriteAt implements bench.Keeper.
func (e *gatherEnd) WriteAt(b []byte, off int64) (int, error) {
	return len(b), e.onCard.WriteAt(b, uint64(off))
}

// Cache implements bench.Keeper.
func (e *gatherEnd) Cache(bool) error { return noPeer() }

// gatherPosting is a Move with its lists.
type gatherPosting struct {
	posting
	held []io.Closer
}

// Close implements bench.Posting.
func (p *gatherPosting) Close() (err error) {
	for _, c := range p.held {
		err = errors.Join(err, c.Close())
	}
	return err
}

// Prepare implements bench.End.
func (e *gatherEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting, error) {
	p := &gatherPosting{}
	if e.Variant == copyVariant {
		bytes := size * uint64(len(local))
		mem := e.Far()[uint64(remote[0])*size%(uint64(len(e.Far()))-bytes+1):][:bytes]
		p.posting = func(context.Context) error {
			if op == bench.OpRead {
				return e.onCard.WriteAt(mem, 0)
			}
			return e.onCard.ReadAt(mem, 0)
		}
		return p, nil
	}
	near, nearList, err := e.side(p, cuda.Span{Memory: e.onCard, N: e.bytes}, size, local)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	far, farList, err := e.side(p, cuda.Span{Memory: e.pinned, N: uint64(len(e.Far()))}, size,
		remote)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	m := &cuda.Move{Count: len(local), Dst: farList, Src: nearList,
		Parts: []cuda.Part{{Dst: far, Src: near, Entry: size}}}
	if op == bench.OpRead {
		m.Dst, m.Src, m.Parts[0].Dst, m.Parts[0].Src = nearList, farList, near, far
	}
	p.posting = func(context.Context) error {
		_, _, err := e.dev.Run(m, e.budget, kernels[e.Variant])
		return err
	}
	return p, nil
}

// side is where the pieces of one side lie: in one run, or at the places of a list, which is in the
// memory of its reader.
func (e *gatherEnd) side(p *gatherPosting, whole cuda.Span, size uint64, slots []int32) (cuda.Span,
	cuda.Index, error) {
	n := uint64(len(slots))
	if adjacent(slots) {
		return cuda.Span{Memory: whole.Memory, Off: uint64(slots[0]) * size, N: n * size},
			cuda.Index{}, nil
	}
	buffer, err := hostmem.Alloc(4*n, hostmem.Options{Purpose: "bench", Huge: hostmem.HugeNone,
		Populate: true})
	if err != nil {
		return whole, cuda.Index{}, err
	}
	for i, slot := range slots {
		binary.LittleEndian.PutUint32(buffer.Bytes()[4*i:], uint32(slot))
	}
	list, err := e.dev.Alloc(4 * n)
	if err == nil {
		p.held = append(p.held, list)
		err = list.WriteAt(buffer.Bytes()[:4*n], 0)
	}
	err = errors.Join(err, buffer.Close())
	return whole, cuda.Index{List: cuda.Span{Memory: list, N: 4 * n}}, err
}

func (e *gatherEnd) close() {
	for _, m := range []*cuda.Memory{e.pinned, e.onCard} {
		if m != nil {
			m.Close()
		}
	}
	if e.pool != nil {
		e.pool.Close()
	}
	if e.dev != nil {
		e.dev.Close()
	}
}
