// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
)

// Prepared is a Move whose launch the driver has captured as a CUDA graph: replaying it is one call
// of the driver, without the arguments being read and checked again. The addresses are fixed, what
// they hold is not: between replays the lists may be written anew, with index -1 for the entries
// that are left out this time. All methods may be called by any goroutine.
type Prepared struct {
	dev    *Device
	launch Launch
	n      uint64 // entries
	graph  *gpu.Graph
	spans  []preparedSpan
	count  counting
	closed bool
}

// preparedSpan is a memory that the graph reaches, and where it was.
type preparedSpan struct {
	m  *Memory
	at uint64
}

// Prepare captures a Move by the kernel that Run would take, or that only names. Where that has not
// been measured yet, it is, which performs the Move. Graphs have no variant without a kernel, and a
// budget without a multiprocessor is a *VariantError. A driver without graphs is answered with
// driver.ErrNotSupported: Run does the same. Close it before the Device.
func (d *Device) Prepare(m *DeviceMove, b Budget, only string) (*Prepared, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var a args
	if err := m.fill(&a, d); err != nil {
		return nil, err
	}
	if !d.moves.Graphs {
		return nil, fmt.Errorf("prepare: the driver lacks graphs: %w", driver.ErrNotSupported)
	}
	if only != "" && kernelOf(only) == "" {
		return nil, unfit(only, "a graph launches a kernel, this variant has none")
	}
	if err := b.check(VariantRows); err != nil {
		return nil, err
	}
	l, err := d.chooseKernel(m, &a, b, only)
	if err != nil {
		return nil, err
	}
	p := &Prepared{dev: d, launch: l, n: a.count}
	if err := p.open(&a); err != nil {
		p.free()
		return nil, fmt.Errorf("prepare: %w", err)
	}
	p.keep(m)
	return p, nil
}

// chooseKernel is choose among kernels alone.
func (d *Device) chooseKernel(m *DeviceMove, a *args, b Budget, only string) (Launch, error) {
	l, err := d.choose(m, a, b, only)
	if err != nil || l.Kernel != "" {
		return l, err
	}
	c, err := d.choice(m, a, b)
	if err != nil {
		return Launch{}, err
	}
	best := Candidate{Variant: VariantRows}
	for _, p := range c.Candidates {
		if kernelOf(p.Variant) != "" && p.GBps > best.GBps {
			best = p
		}
	}
	l, err = d.plan(best.Variant, m, a, b)
	l.Why = "graphs launch kernels alone; " + c.Why
	return l, err
}

// open captures the launch.
func (p *Prepared) open(a *args) (err error) {
	d := p.dev
	if err = p.count.open(d.d); err != nil {
		return err
	}
	a.tally = p.count.at
	c := csrcLaunch(&p.launch, a)
	p.graph, err = d.d.Capture(&c)
	return err
}

// keep notes which memories must stay as they are.
func (p *Prepared) keep(m *DeviceMove) {
	for k := range m.Parts {
		p.spans = append(p.spans, preparedSpan{m: m.Parts[k].Dst.Memory},
			preparedSpan{m: m.Parts[k].Src.Memory})
	}
	for _, x := range []*DeviceIndex{&m.Dst, &m.Src} {
		if x.List.Memory != nil {
			p.spans = append(p.spans, preparedSpan{m: x.List.Memory})
		}
	}
	for i := range p.spans {
		p.spans[i].at = p.spans[i].m.at
	}
}

// Launch says how it is launched, and why so.
func (p *Prepared) Launch() Launch { return p.launch }

// Run replays the launch and waits for the end: one crossing, without an allocation. It leaves out,
// counts and answers as Device.Run does. Closed memory is driver.ErrClosed.
func (p *Prepared) Run() (Tally, error) {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if p.closed {
		return Tally{}, driver.ErrClosed
	}
	for i := range p.spans {
		if p.spans[i].m.at != p.spans[i].at {
			return Tally{}, driver.ErrClosed
		}
	}
	t, err := p.count.count(p.dev.d, p.graph.Replay)
	if err != nil {
		return Tally{}, err
	}
	return t.sum(p.n)
}

// Close frees the graph. It is idempotent.
func (p *Prepared) Close() error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if p.closed {
		return nil
	}
	return p.free()
}

// free undoes open, or what there is of it. The caller holds dev.mu.
func (p *Prepared) free() error {
	p.closed = true
	if p.graph != nil {
		p.graph.Close()
	}
	return p.count.close(p.dev.d)
}
