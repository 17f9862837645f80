// SPDX-License-Identifier: Apache-2.0

package trace

import "math"

// quantiles is a distribution of lengths: a share shares[i] of all lengths is at most values[i].
// Between two of them the logarithm of the length is interpolated linearly.
type quantiles struct {
	shares []float64
	values []float64
}

// The lengths of the conversation trace.
var (
	quantileShares = []float64{0, 0.01, 0.05, 0.1, 0.175, 0.25, 0.375, 0.5, 0.625, 0.75, 0.825, 0.9,
		0.95, 0.975, 0.99, 0.999, 1}

	inputLengths = quantiles{quantileShares, []float64{
		891, 894, 901, 964, 1442, 2306, 4596, 6909, 10328, 15368, 19403, 27367, 39552, 59009, 85401,
		121301, 126195}}
	outputLengths = quantiles{quantileShares, []float64{
		1, 3, 10, 24, 72, 156, 275, 350, 410, 472, 522, 597, 698, 836, 1120, 2000, 2000}}
)

// at returns the length at a share in [0, 1).
func (q *quantiles) at(share float64) int {
	i := 1
	for i < len(q.shares)-1 && share >= q.shares[i] {
		i++
	}
	along := (share - q.shares[i-1]) / (q.shares[i] - q.shares[i-1])
	low, high := math.Log(q.values[i-1]), math.Log(q.values[i])
	return int(math.Round(math.Exp(low + along*(high-low))))
}
