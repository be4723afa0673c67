package protocol

import (
	"math"
	"math/big"
	"testing"
)

// edges are numbers at which arithmetic goes wrong.
var edges = []uint64{0, 1, 2, 7, 511, 512, 4096, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32, 1<<52 - 1, 1 << 52,
	1<<55 - 1, 1 << 55, 1<<63 - 512, 1<<63 - 1, 1 << 63, 1<<63 + 1, math.MaxUint64 - 512, math.MaxUint64 - 1, math.MaxUint64}

func bigOf(v uint64) *big.Int { return new(big.Int).SetUint64(v) }

func TestRangeOK(t *testing.T) {
	for _, off := range edges {
		for _, n := range edges {
			for _, limit := range edges {
				want := new(big.Int).Add(bigOf(off), bigOf(n)).Cmp(bigOf(limit)) <= 0
				if got := RangeOK(off, n, limit); got != want {
					t.Errorf("%d+%d in %d: %v", off, n, limit, got)
				}
			}
		}
	}
}

func TestBlocksToBytes(t *testing.T) {
	for _, n := range edges {
		for shift := range uint8(70) {
			want := new(big.Int).Lsh(bigOf(n), uint(shift))
			got, ok := BlocksToBytes(n, shift)
			if ok != want.IsUint64() || ok && got != want.Uint64() {
				t.Errorf("%d blocks of 2^%d: %d %v", n, shift, got, ok)
			}
		}
	}
}

func TestByteRange(t *testing.T) {
	limit := big.NewInt(math.MaxInt64)
	for _, slba := range edges {
		for _, blocks := range edges {
			for _, nsze := range edges {
				for _, shift := range []uint8{0, 9, 12, 16, 63, 64, 255} {
					end := new(big.Int).Add(bigOf(slba), bigOf(blocks))
					want := end.Cmp(bigOf(nsze)) <= 0 && end.Lsh(end, uint(shift)).Cmp(limit) <= 0
					off, n, ok := ByteRange(slba, blocks, shift, nsze)
					if ok != want {
						t.Fatalf("%d+%d blocks of 2^%d in %d: %v", slba, blocks, shift, nsze, ok)
					}
					if ok && (big.NewInt(off).Cmp(new(big.Int).Lsh(bigOf(slba), uint(shift))) != 0 ||
						big.NewInt(n).Cmp(new(big.Int).Lsh(bigOf(blocks), uint(shift))) != 0) {
						t.Fatalf("%d+%d blocks of 2^%d: %d+%d bytes", slba, blocks, shift, off, n)
					}
				}
			}
		}
	}
}

func TestMaxTransferBytes(t *testing.T) {
	for _, tc := range []struct {
		mdts, mpsmin uint8
		want         uint64
	}{
		{0, 0, 0}, {5, 0, 128 << 10}, {8, 0, 1 << 20}, {1, 4, 128 << 10}, {51, 0, 1 << 63}, {52, 0, 0}, {255, 255, 0},
	} {
		if got := MaxTransferBytes(tc.mdts, tc.mpsmin); got != tc.want {
			t.Errorf("MDTS %d MPSMIN %d: %d, want %d", tc.mdts, tc.mpsmin, got, tc.want)
		}
	}
}
