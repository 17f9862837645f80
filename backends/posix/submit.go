// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// can is what the peers take.
const can = driver.CanPattern | driver.CanDurable

// take implements ownfiles.Config.
func (b *Backend) take(of *ownfiles.Job[extent], batch *driver.Batch) error {
	j := &b.jobs[of.Slot]
	j.durable = batch.Durable || b.cfg.Durable && batch.Op == driver.Write
	if j.durable {
		if err := j.checkDurable(); err != nil {
			return err
		}
		b.durables++
	}
	j.sort()
	j.high, j.syncs, j.synced = 0, 0, false
	return nil
}
