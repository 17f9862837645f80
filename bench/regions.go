// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// regionBytes is the size of the regions that are registered: they lie in one memory,
// as the blocks of a pool do.
const regionBytes = 4096

// regionRepeats is how often registering and describing are measured.
const regionRepeats = 3

// Regions registers count regions of an engine one after the other, and describes
// described of them. P50us is the time for one region and for the whole description;
// what a description weighs is the figure "desc-bytes". All regions are closed again.
func Regions(eng *engine.Engine, backend string, count, described int) ([]Result, error) {
	memory, err := eng.Alloc(uint64(count)*regionBytes, engine.AllocOptions{Purpose: "bench"})
	if err != nil {
		return nil, err
	}
	defer memory.Close()
	r := &registering{eng: eng, memory: memory, names: make([]string, count)}
	for i := range r.names {
		r.names[i] = fmt.Sprintf("kv.%05d", i)
	}
	each, describe := NewSamples(regionRepeats), NewSamples(regionRepeats)
	weight := 0
	for range regionRepeats {
		took, err := r.measure(count, nil)
		if err != nil {
			return nil, err
		}
		each.Add(took / time.Duration(count))
		_, err = r.measure(described, func(regions []*engine.Region) error {
			begin := time.Now()
			d, err := eng.Describe(regions...)
			describe.Add(time.Since(begin))
			weight = len(d)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	list := []Result{r.result("register", backend, count, each), r.result("describe", backend,
		described, describe)}
	list[1].Extra = map[string]float64{"desc-bytes": float64(weight)}
	return list, nil
}

type registering struct {
	eng    *engine.Engine
	memory *engine.Memory
	names  []string
}

// measure registers that many regions, has them looked at, and closes them.
func (r *registering) measure(count int, look func([]*engine.Region) error) (took time.Duration,
	err error) {
	regions := make([]*engine.Region, 0, count)
	defer func() {
		for _, region := range regions {
			err = errors.Join(err, region.Close())
		}
	}()
	whole := r.memory.Segment()
	begin := time.Now()
	for i := range count {
		part, err := whole.Slice(uint64(i)*regionBytes, regionBytes, [16]byte{})
		if err != nil {
			return 0, err
		}
		region, err := r.eng.Register(r.names[i], part)
		if err != nil {
			return 0, fmt.Errorf("register region %d of %d: %w", i, count, err)
		}
		regions = append(regions, region)
	}
	took = time.Since(begin)
	if look != nil {
		err = look(regions)
	}
	return took, err
}

func (r *registering) result(op, backend string, batch int, s *Samples) Result {
	res := Result{Backend: backend, Op: op, Size: regionBytes, Batch: batch, Threads: 1,
		Rounds: s.Count(), Ops: s.Count(),
		Route: backend, Memory: r.memory.From(), P50us: Micros(s.Percentile(50)),
		P99us: Micros(s.Percentile(99))}
	if res.P50us > 0 {
		res.OpsPerS = 1e6 / res.P50us
	}
	return res
}
