// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"io"

	"github.com/sluicehq/sluice/internal/figures"
)

// OffloadReport says what was spilled to the file and read back. Mismatches of what came back
// are among those of the Report.
type OffloadReport struct {
	Path       string `json:"path"` // without a name since, unless --offload names it
	Route      string `json:"route"`
	FileBlocks uint64 `json:"file_blocks"` // room in the file
	FileBytes  uint64 `json:"file_bytes"`
	Attached   uint64 `json:"blocks_attached"` // that a kept file held already
	Evicted    uint64 `json:"blocks_evicted"`  // of the file, for others

	Spilled    uint64  `json:"blocks_spilled"`
	SpillBytes uint64  `json:"spill_bytes"`
	SpillGBps  float64 `json:"spill_gbps"`
	PwriteGBps float64 `json:"pwrite_gbps"` // the same blocks to another file, in alternation
	SpillRatio float64 `json:"spill_ratio"`

	Recalled    uint64  `json:"blocks_recalled"` // read back and checked
	RecallBytes uint64  `json:"recall_bytes"`
	RecallGBps  float64 `json:"recall_gbps"`
	PreadGBps   float64 `json:"pread_gbps"` // the same blocks of the same file, in alternation
	RecallRatio float64 `json:"recall_ratio"`
}

func (o *OffloadResult) report() *OffloadReport {
	if o == nil {
		return nil
	}
	r := &OffloadReport{Path: o.Path, Route: o.Way, FileBlocks: o.Blocks, FileBytes: o.Bytes,
		Attached: o.Attached, Evicted: o.Evicted,
		Spilled: o.Spilled.Blocks, SpillBytes: o.Spilled.Bytes, Recalled: o.Recalled.Blocks,
		RecallBytes: o.Recalled.Bytes}
	r.SpillGBps, r.PwriteGBps, r.SpillRatio = o.Spilled.rates()
	r.RecallGBps, r.PreadGBps, r.RecallRatio = o.Recalled.rates()
	return r
}

func (m *moved) rates() (ours, plain, ratio float64) {
	ours, plain = figures.GBps(m.Bytes, m.Took), figures.GBps(m.BaseBytes, m.Base)
	if plain > 0 {
		ratio = ours / plain
	}
	return ours, plain, ratio
}

func (r *OffloadReport) text(w io.Writer) error {
	_, err := fmt.Fprintf(w, `offload     %s: room for %d blocks (%s); %d found there, %d evicted
spilled     %d blocks, %s: %.2f GB/s, pwrite %.2f GB/s, ratio %.3f
read back   %d blocks, %s: %.2f GB/s, pread %.2f GB/s, ratio %.3f
`,
		r.Path, r.FileBlocks, figures.RoundSize(r.FileBytes), r.Attached, r.Evicted,
		r.Spilled, figures.RoundSize(r.SpillBytes), r.SpillGBps, r.PwriteGBps, r.SpillRatio,
		r.Recalled, figures.RoundSize(r.RecallBytes), r.RecallGBps, r.PreadGBps, r.RecallRatio)
	return err
}
