// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// countingBytes is the page of a tally.
const countingBytes = 4096

// counting is a tally in pinned memory of the host. Kernels add to it by way of the bus what they
// leave out, which is mostly nothing: so no launch waits for a copy of it.
type counting struct {
	page *hostmem.Buffer
	at   uint64 // of the page, as the card sees it
}

func (c *counting) open(d *gpu.Device) (err error) {
	if c.page, err = hostmem.Alloc(countingBytes, hostmem.Options{Purpose: "cuda-tally",
		Populate: true}); err != nil {
		return err
	}
	c.at, err = d.Pin(c.page.Bytes())
	return err
}

// begin comes before a launch.
func (c *counting) begin() { copy(c.page.Bytes(), clean.bytes()) }

// sum is what a launch that has ended counted.
func (c *counting) sum() (t tally) {
	copy(t.bytes(), c.page.Bytes())
	return t
}

// close undoes open, or what there is of it; of a closed device it is done already.
func (c *counting) close(d *gpu.Device) (err error) {
	if c.at != 0 {
		err = d.Unpin(c.page.Bytes())
		c.at = 0
	}
	if c.page != nil {
		_ = c.page.Close()
		c.page = nil
	}
	if errors.Is(err, driver.ErrClosed) {
		return nil
	}
	return err
}
