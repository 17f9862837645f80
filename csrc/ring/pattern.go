// SPDX-License-Identifier: Apache-2.0

package ring

import "github.com/sluicehq/sluice/driver"

// Pages is a driver.Pattern without its lists, with the layout of sl_pages (csrc/sluice.h).
type Pages struct {
	Count, Run                                       uint64
	LocalBase, RemoteBase, LocalStride, RemoteStride uint64
	LocalKey, RemoteKey                              uint32
}

// Nest is the rest of a pattern that is not plain, with the layout of sl_nest.
type Nest struct {
	Runs, Loops                                  uint32
	Loop                                         [driver.LoopsMax]driver.Loop
	LocalFirst, LocalPer, RemoteFirst, RemotePer uint32
	LocalStep, RemoteStep                        uint64
}

// RunsMax bounds the runs of all entries of a pattern together.
const RunsMax = 64 << 10

// PagesOf returns a pattern as C takes it. It returns false if it has more than RunsMax runs or too
// many loops, or if a list does not have the length that C takes it to have; C checks the rest.
func PagesOf(p *driver.Pattern) (pages Pages, ok bool) {
	if p.Count <= 0 || len(p.Loops) > driver.LoopsMax || !listFits(&p.Local, p.Count) ||
		!listFits(&p.Remote, p.Count) ||
		p.Plain() && (p.Local.First != 0 || p.Remote.First != 0) {
		return Pages{}, false
	}
	runs := uint64(p.Count)
	for i := 0; i < len(p.Loops) && runs <= RunsMax; i++ {
		runs *= uint64(p.Loops[i].N)
	}
	return Pages{
		Count: uint64(p.Count), Run: p.Run,
		LocalBase: p.Local.Base, RemoteBase: p.Remote.Base,
		LocalStride: p.Local.Stride, RemoteStride: p.Remote.Stride,
		LocalKey: p.LocalKey, RemoteKey: p.RemoteKey,
	}, runs <= RunsMax
}

// listFits reports whether a list has a number for each slot.
func listFits(s *driver.Side, count int) bool {
	slots := uint64(count)
	if s.Per > 1 {
		slots = (uint64(s.First) + slots + uint64(s.Per) - 1) / uint64(s.Per)
	}
	return s.List == nil || uint64(len(s.List)) == slots
}

// NestOf returns the rest of a pattern for which PagesOf has returned true and Plain false.
func NestOf(p *driver.Pattern) Nest {
	nest := Nest{
		Runs: uint32(p.Runs()), Loops: uint32(len(p.Loops)),
		LocalFirst: p.Local.First, LocalPer: p.Local.Per,
		RemoteFirst: p.Remote.First, RemotePer: p.Remote.Per,
		LocalStep: p.Local.Step, RemoteStep: p.Remote.Step,
	}
	copy(nest.Loop[:], p.Loops)
	return nest
}
