// Convolutions and linear layers with a weight that has values only where a mask has a bit: the dense weight is never
// made. Rows of the images are copied to scratch with zeros around them, one plane for each phase of a stride, so that
// every tap of a kernel is one offset and results are sums of shifted planes. Each result is summed up by one thread, in an
// order that depends on the mask alone.

#include "bits.hpp"
#include "threads.hpp"

namespace {

constexpr int64_t kLanes = 16, kVectors = 6;  // of a vector of floats; of vectors that stay in registers
constexpr int64_t kTaps = 1024;               // in scratch at a time, for each thread
constexpr int64_t kKernel = 8, kPhases = 8;   // the largest kernel and stride, along one side
constexpr int64_t kLists = 16;                // of taps that one walk through the mask fills, for channels and phases
constexpr int64_t kBand = 10 * 1024;          // floats of the rows in scratch, as far as one row has fewer

typedef float Vector __attribute__((vector_size(64)));
typedef float Loose __attribute__((vector_size(64), aligned(4)));

enum Type : int64_t { kFloat32, kBfloat16, kFloat16 };

struct Task {
  int64_t type;  // of the values
  const void* values;
  const uint8_t* mask;  // null: there is a value for each element
  int64_t count;        // of values
  int64_t rows, columns, kernel[2], stride[2], padding[2], dilation[2];
  int64_t images, in_size[2], out_size[2];
  float* in;
  int64_t in_stride[4];  // image, channel, row, column
  float* out;
  int64_t out_stride[4];
  const float* bias;
  float* gradient;  // of the values
};

// How places of a result depend on places of what it is made of, along one side. A result's place is `quotient *
// target_step + phase`; tap k of it reads place `(quotient + low + offset[k]) * source_step + shift` of the source.
struct Axis {
  int64_t targets, sources, target_step, source_step, low = 0, high = 0;
  int64_t source_phases, shift[kPhases] = {};
  int64_t offset[kKernel], source_phase[kKernel], target_phase[kKernel];

  int64_t quotients() const { return (targets + target_step - 1) / target_step; }
  int64_t reach() const { return high - low; }
};

Axis forward_axis(const Task& task, int side) {
  const int64_t stride = task.stride[side];
  Axis axis{task.out_size[side], task.in_size[side], 1, stride};
  axis.source_phases = 0;
  int64_t known[kPhases];
  for (int64_t k = 0; k < task.kernel[side]; ++k) {
    const int64_t place = k * task.dilation[side], phase = place % stride;
    int64_t which = 0;
    while (which < axis.source_phases && known[which] != phase) ++which;
    if (which == axis.source_phases) {
      known[which] = phase;
      axis.shift[axis.source_phases++] = phase - task.padding[side];
    }
    axis.offset[k] = place / stride;
    axis.source_phase[k] = which;
    axis.target_phase[k] = 0;
    axis.high = std::max(axis.high, axis.offset[k]);
  }
  return axis;
}

Axis backward_axis(const Task& task, int side) {
  const int64_t stride = task.stride[side];
  Axis axis{task.in_size[side], task.out_size[side], stride, 1};
  axis.source_phases = 1;
  for (int64_t k = 0; k < task.kernel[side]; ++k) {
    const int64_t away = k * task.dilation[side] - task.padding[side];
    const int64_t phase = ((away % stride) + stride) % stride;
    axis.offset[k] = (phase - away) / stride;
    axis.source_phase[k] = 0;
    axis.target_phase[k] = phase;
    axis.low = k == 0 ? axis.offset[k] : std::min(axis.low, axis.offset[k]);
    axis.high = k == 0 ? axis.offset[k] : std::max(axis.high, axis.offset[k]);
  }
  for (int64_t k = 0; k < task.kernel[side]; ++k) axis.offset[k] -= axis.low;
  return axis;
}

// What lies where in scratch.
struct Layout {
  Axis h, w;
  int64_t channels;            // of the source
  int64_t band, bands;         // quotients of rows at a time, and how often
  int64_t pitch, rows, plane;  // of a plane
  int64_t channel;             // floats of all planes of a channel
  int64_t vectors;             // of a result's band, rows one pitch apart
  int64_t phases, group;       // of the targets; channels whose taps are looked for in one walk
  int64_t pieces, each;        // threads at work, and the floats that each has for itself
  int64_t tap[kKernel * kKernel], phase[kKernel * kKernel];

  bool carries() const { return h.source_step == 1 && h.target_step == 1; }
  int64_t planes() const { return channels * channel + kLanes; }
  int64_t floats() const { return planes() + pieces * each; }
};

Layout layout_of(const Task& task, bool backward, int64_t threads) {
  Layout all{backward ? backward_axis(task, 0) : forward_axis(task, 0),
             backward ? backward_axis(task, 1) : forward_axis(task, 1)};
  all.channels = backward ? task.rows : task.columns;
  all.pitch = all.w.quotients() + all.w.reach();
  const int64_t row = all.channels * all.h.source_phases * all.w.source_phases * all.pitch;
  const int64_t most = std::max<int64_t>(1, kBand / std::max<int64_t>(1, row) - all.h.reach());
  all.bands = (all.h.quotients() + most - 1) / most;
  all.band = (all.h.quotients() + all.bands - 1) / all.bands;
  all.bands = (all.h.quotients() + all.band - 1) / all.band;
  all.rows = all.band + all.h.reach();
  all.plane = all.rows * all.pitch;
  all.channel = all.plane * all.h.source_phases * all.w.source_phases;
  all.vectors = ((all.band - 1) * all.pitch + all.w.quotients() + kLanes - 1) / kLanes;
  all.phases = all.h.target_step * all.w.target_step;
  const int64_t targets = backward ? task.columns : task.rows;
  all.pieces = std::max<int64_t>(1, std::min(threads, targets));
  all.group = backward ? std::max<int64_t>(1, kLists / all.phases) : 1;
  all.each = 2 * kTaps + all.group * all.phases * all.vectors * kLanes;
  for (int64_t y = 0; y < task.kernel[0]; ++y) {
    for (int64_t x = 0; x < task.kernel[1]; ++x) {
      const int64_t k = y * task.kernel[1] + x;
      const int64_t plane = all.h.source_phase[y] * all.w.source_phases + all.w.source_phase[x];
      all.tap[k] = plane * all.plane + all.h.offset[y] * all.pitch + all.w.offset[x];
      all.phase[k] = all.h.target_phase[y] * all.w.target_step + all.w.target_phase[x];
    }
  }
  return all;
}

// ---------------------------------------------------------------------------------------------------------------- the mask

class Mask {
 public:
  explicit Mask(const Task& task)
      : mask_(task.mask), bytes_((task.rows * task.columns * task.kernel[0] * task.kernel[1] + 7) / 8) {}

  uint64_t bits(int64_t first, int64_t count) const {  // at most 57
    if (mask_ == nullptr) return (1ull << count) - 1;
    uint64_t word = 0;
    const int64_t byte = first >> 3, there = bytes_ - byte;
    if (there >= 8) {
      std::memcpy(&word, mask_ + byte, 8);
    } else {
      std::memcpy(&word, mask_ + byte, there);
    }
    return (word >> (first & 7)) & ((1ull << count) - 1);
  }

  int64_t set(int64_t first, int64_t last) const {  // how many
    if (mask_ == nullptr) return last - first;
    int64_t found = 0;
    for (; first < last; first += 56) found += __builtin_popcountll(bits(first, std::min<int64_t>(56, last - first)));
    return found;
  }

  // Calls `found(channel, tap)` for each bit of a row.
  template <typename Found>
  void walk(int64_t row, int64_t columns, int64_t taps, const Found& found) const {
    const int64_t first = row * columns * taps, many = taps == 1 ? 56 : 1;
    for (int64_t column = 0; column < columns; column += many) {
      const int64_t some = std::min(many, columns - column);
      for (uint64_t word = bits(first + column * taps, some * taps); word != 0; word &= word - 1) {
        const int64_t bit = __builtin_ctzll(word);
        if (taps == 1) {
          found(column + bit, 0);
        } else {
          found(column, bit);
        }
      }
    }
  }

 private:
  const uint8_t* mask_;
  int64_t bytes_;
};

INLINE float value_of(const Task& task, int64_t place) {
  if (place >= task.count) return 0.0f;  // no sound mask leads there
  switch (task.type) {
    case kFloat32: return static_cast<const float*>(task.values)[place];
    case kBfloat16: return float_of(static_cast<uint32_t>(static_cast<const uint16_t*>(task.values)[place]) << 16);
    default: return from_half(static_cast<const uint16_t*>(task.values)[place]);
  }
}

FOR_EACH_PROCESSOR void values_of(const Task& task, int64_t first, int64_t count, float* to) {
  for (int64_t i = std::max<int64_t>(0, task.count - first); i < count; ++i) to[i] = 0.0f;
  count = std::min(count, task.count - first);
  if (task.type == kFloat32) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<const float*>(task.values)[first + i];
  } else if (task.type == kBfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(task.values) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(task.values) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = from_half(from[i]);
  }
}

// ------------------------------------------------------------------------------------------------------------------ planes

// Copies the rows of a band, of some channels, with zeros around them. Rows that the band before had, too, are those in
// scratch: where results are written over the source, they are not there any more.
FOR_EACH_PROCESSOR void fill(const Layout& all, const float* source, const int64_t* stride, int64_t quotient,
                             int64_t from, int64_t to, float* planes) {
  const int64_t known = all.carries() && quotient > 0 ? all.h.reach() : 0;
  for (int64_t channel = from; channel < to; ++channel) {
    float* row = planes + channel * all.channel;
    for (int64_t plane = 0; known > 0 && plane < all.w.source_phases; ++plane) {
      float* first = row + plane * all.plane;
      std::memmove(first, first + all.band * all.pitch, known * all.pitch * sizeof(float));
    }
    for (int64_t a = 0; a < all.h.source_phases; ++a) {
      for (int64_t b = 0; b < all.w.source_phases; ++b) {
        const int64_t step = all.w.source_step, shift = all.w.low * step + all.w.shift[b];
        const int64_t first = std::min(all.pitch, std::max<int64_t>(0, (step - 1 - shift) / step));
        const int64_t last = std::max(first, std::min(all.pitch, (all.w.sources - shift + step - 1) / step));
        row += known * all.pitch;
        for (int64_t r = known; r < all.rows; ++r, row += all.pitch) {
          const int64_t y = (quotient + r + all.h.low) * all.h.source_step + all.h.shift[a];
          if (y < 0 || y >= all.h.sources || first == last) {
            std::memset(row, 0, all.pitch * sizeof(float));
            continue;
          }
          const float* here = source + channel * stride[1] + y * stride[2] + shift * stride[3];
          for (int64_t x = 0; x < first; ++x) row[x] = 0.0f;
          if (step * stride[3] == 1) {
            for (int64_t x = first; x < last; ++x) row[x] = here[x];
          } else {
            for (int64_t x = first; x < last; ++x) row[x] = here[x * step * stride[3]];
          }
          for (int64_t x = last; x < all.pitch; ++x) row[x] = 0.0f;
        }
      }
    }
  }
}

// Writes the band of one result, whose rows are one pitch apart in `sums`.
void put(const Layout& all, const float* sums, int64_t phase, int64_t quotient, float bias, float* target,
         const int64_t* stride) {
  const int64_t a = phase / all.w.target_step, b = phase % all.w.target_step;
  for (int64_t r = 0; r < all.band; ++r, sums += all.pitch) {
    const int64_t y = (quotient + r) * all.h.target_step + a;
    if (y >= all.h.targets) return;
    float* row = target + y * stride[2] + b * stride[3];
    const int64_t columns = (all.w.targets - b + all.w.target_step - 1) / all.w.target_step;
    const int64_t step = all.w.target_step * stride[3];
    if (step == 1) {
      for (int64_t x = 0; x < columns; ++x) row[x] = sums[x] + bias;
    } else {
      for (int64_t x = 0; x < columns; ++x) row[x * step] = sums[x] + bias;
    }
  }
}

// -------------------------------------------------------------------------------------------------------------------- sums

template <int kCount>
INLINE void add_planes(const float* planes, const int32_t* offsets, const float* weights, int64_t taps, float* sums,
                       bool first) {
  Vector sum[kCount];
  for (int v = 0; v < kCount; ++v) sum[v] = first ? Vector{} : *reinterpret_cast<const Loose*>(sums + v * kLanes);
  for (int64_t i = 0; i < taps; ++i) {
    const float* plane = planes + offsets[i];
    const float weight = weights[i];
#pragma GCC unroll 6
    for (int v = 0; v < kCount; ++v) sum[v] += *reinterpret_cast<const Loose*>(plane + v * kLanes) * weight;
  }
  for (int v = 0; v < kCount; ++v) *reinterpret_cast<Loose*>(sums + v * kLanes) = sum[v];
}

// Adds planes from these offsets on, each times its weight.
FOR_EACH_PROCESSOR void add(const float* planes, const int32_t* offsets, const float* weights, int64_t taps,
                            int64_t vectors, float* sums, bool first) {
  const int64_t blocks = (vectors + kVectors - 1) / kVectors;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t from = b * vectors / blocks, count = (b + 1) * vectors / blocks - from;
    const float* there = planes + from * kLanes;
    float* here = sums + from * kLanes;
    switch (count) {
      case 1: add_planes<1>(there, offsets, weights, taps, here, first); break;
      case 2: add_planes<2>(there, offsets, weights, taps, here, first); break;
      case 3: add_planes<3>(there, offsets, weights, taps, here, first); break;
      case 4: add_planes<4>(there, offsets, weights, taps, here, first); break;
      case 5: add_planes<5>(there, offsets, weights, taps, here, first); break;
      default: add_planes<6>(there, offsets, weights, taps, here, first); break;
    }
  }
}

template <int kCount>
INLINE void add_products(const float* planes, const int32_t* offsets, int64_t taps, const float* gradient, float* to) {
  Vector known[kCount];
  for (int v = 0; v < kCount; ++v) known[v] = *reinterpret_cast<const Loose*>(gradient + v * kLanes);
  for (int64_t i = 0; i < taps; ++i) {
    const float* plane = planes + offsets[i];
    Vector sum{};
#pragma GCC unroll 6
    for (int v = 0; v < kCount; ++v) sum += *reinterpret_cast<const Loose*>(plane + v * kLanes) * known[v];
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    Half halves[2];
    std::memcpy(halves, &sum, sizeof sum);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, &halves[0], sizeof halves[0]);
    quarters[0] += quarters[1];
    to[i] += (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
  }
}

// Adds the products of a gradient and the planes from these offsets on, one sum for each.
FOR_EACH_PROCESSOR void multiply(const float* planes, const int32_t* offsets, int64_t taps, int64_t vectors,
                                 const float* gradient, float* to) {
  const int64_t blocks = (vectors + kVectors - 1) / kVectors;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t from = b * vectors / blocks, count = (b + 1) * vectors / blocks - from;
    const float* there = planes + from * kLanes;
    const float* known = gradient + from * kLanes;
    switch (count) {
      case 1: add_products<1>(there, offsets, taps, known, to); break;
      case 2: add_products<2>(there, offsets, taps, known, to); break;
      case 3: add_products<3>(there, offsets, taps, known, to); break;
      case 4: add_products<4>(there, offsets, taps, known, to); break;
      case 5: add_products<5>(there, offsets, taps, known, to); break;
      default: add_products<6>(there, offsets, taps, known, to); break;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------ layers

// What one thread does for its channels of one band of one image.
struct Piece {
  const Task& task;
  const Layout& all;
  const Mask mask;
  const float* planes;
  int64_t quotient, image;
  int64_t from, to;  // channels
  float* own;        // scratch

  int64_t taps() const { return task.kernel[0] * task.kernel[1]; }
  int32_t* offsets() const { return reinterpret_cast<int32_t*>(own); }
  float* weights() const { return own + kTaps; }
  float* sums() const { return own + 2 * kTaps; }

  void forward() const {
    int64_t rank = mask.set(0, from * task.columns * taps());
    for (int64_t row = from; row < to; ++row) {
      int64_t listed = 0;
      bool first = true;
      const auto flush = [&] {
        values_of(task, rank, listed, weights());
        add(planes, offsets(), weights(), listed, all.vectors, sums(), first);
        rank += listed;
        listed = 0;
        first = false;
      };
      mask.walk(row, task.columns, taps(), [&](int64_t column, int64_t tap) {
        offsets()[listed++] = static_cast<int32_t>(column * all.channel + all.tap[tap]);
        if (listed == kTaps) flush();
      });
      if (listed > 0 || first) flush();
      float* target = task.out + image * task.out_stride[0] + row * task.out_stride[1];
      put(all, sums(), 0, quotient, task.bias == nullptr ? 0.0f : task.bias[row], target, task.out_stride);
    }
  }

  void backward() const {
    for (int64_t column = from; column < to; column += all.group) group(column, std::min(all.group, to - column));
  }

  void group(int64_t column, int64_t columns) const {
    const int64_t room = kTaps / (all.group * all.phases), size = all.vectors * kLanes;
    int64_t listed[kLists + kPhases * kPhases] = {};
    bool begun[kLists + kPhases * kPhases] = {};
    const auto flush = [&](int64_t list) {
      add(planes, offsets() + list * room, weights() + list * room, listed[list], all.vectors, sums() + list * size,
          !begun[list]);
      begun[list] = true;
      listed[list] = 0;
    };
    const int64_t many = taps() == 1 ? columns : 1;  // columns at a time
    int64_t rank = 0;
    for (int64_t row = 0; row < task.rows; ++row) {
      const int64_t first = row * task.columns * taps();
      rank += mask.set(first, first + column * taps());
      for (int64_t c = 0; c < columns; c += many) {
        for (uint64_t word = mask.bits(first + (column + c) * taps(), many * taps()); word != 0; word &= word - 1) {
          const int64_t bit = __builtin_ctzll(word), tap = many == 1 ? bit : 0;
          const int64_t list = (c + (many == 1 ? 0 : bit)) * all.phases + all.phase[tap];
          const int64_t place = list * room + listed[list];
          offsets()[place] = static_cast<int32_t>(row * all.channel + all.tap[tap]);
          weights()[place] = value_of(task, rank++);
          if (++listed[list] == room) flush(list);
        }
      }
      rank += mask.set(first + (column + columns) * taps(), first + task.columns * taps());
    }
    for (int64_t list = 0; list < columns * all.phases; ++list) {
      if (listed[list] > 0 || !begun[list]) flush(list);
      float* target = task.in + image * task.in_stride[0] + (column + list / all.phases) * task.in_stride[1];
      put(all, sums() + list * size, list % all.phases, quotient, 0.0f, target, task.in_stride);
    }
  }

  void weight() const {
    int64_t rank = mask.set(0, from * task.columns * taps());
    for (int64_t row = from; row < to; ++row) {
      gradient(task.out + image * task.out_stride[0] + row * task.out_stride[1]);
      int64_t listed = 0;
      const auto flush = [&] {
        const int64_t there = std::max<int64_t>(0, std::min(listed, task.count - rank));
        multiply(planes, offsets(), there, all.vectors, sums(), task.gradient + rank);
        rank += listed;
        listed = 0;
      };
      mask.walk(row, task.columns, taps(), [&](int64_t column, int64_t tap) {
        offsets()[listed++] = static_cast<int32_t>(column * all.channel + all.tap[tap]);
        if (listed == kTaps) flush();
      });
      if (listed > 0) flush();
    }
  }

  // The rows of a gradient one pitch apart, with zeros between them.
  void gradient(const float* source) const {
    float* to = sums();
    std::memset(to, 0, all.vectors * kLanes * sizeof(float));
    for (int64_t r = 0; r < all.band && quotient + r < all.h.targets; ++r, to += all.pitch) {
      const float* row = source + (quotient + r) * task.out_stride[2];
      for (int64_t x = 0; x < all.w.targets; ++x) to[x] = row[x * task.out_stride[3]];
    }
  }
};

enum Way : int64_t { kForward, kBackward, kWeight };

void run(const Task& task, Way way, float* scratch, int64_t threads) {
  const bool back = way == kBackward;
  const Layout all = layout_of(task, back, threads);
  const int64_t targets = back ? task.columns : task.rows;
  const float* source = back ? task.out : task.in;
  const int64_t* stride = back ? task.out_stride : task.in_stride;
  std::memset(scratch + all.planes() - kLanes, 0, kLanes * sizeof(float));
  for (int64_t image = 0; image < task.images; ++image) {
    for (int64_t band = 0; band < all.bands; ++band) {
      const int64_t quotient = band * all.band;
      share(all.pieces, threads, [&](int64_t piece) {
        const int64_t from = piece * all.channels / all.pieces, to = (piece + 1) * all.channels / all.pieces;
        fill(all, source + image * stride[0], stride, quotient, from, to, scratch);
      });
      share(all.pieces, threads, [&](int64_t piece) {
        float* own = scratch + all.planes() + piece * all.each;
        const int64_t from = piece * targets / all.pieces, to = (piece + 1) * targets / all.pieces;
        const Piece mine{task, all, Mask(task), scratch, quotient, image, from, to, own};
        way == kForward ? mine.forward() : way == kBackward ? mine.backward() : mine.weight();
      });
    }
  }
}

}  // namespace

extern "C" {

// The floats of scratch that a call needs.
int64_t lowtide_sparse_scratch(const Task* task, int64_t way, int64_t threads) {
  return layout_of(*task, way == kBackward, threads).floats();
}

// The result (way 0), the gradient of the input (1), or that of the values (2), which is added to what is there.
void lowtide_sparse_run(const Task* task, int64_t way, float* scratch, int64_t threads) {
  run(*task, static_cast<Way>(way), scratch, threads);
}

}  // extern "C"
